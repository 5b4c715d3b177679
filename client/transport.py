"""Transport: the I/O of `TridentClient`."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client.connection import Connection
from client.errors import (
    ConfigurationError,
    RequestCancelledError,
    RequestTimeoutError,
    TridentClientError,
    UnavailableError,
)
from client.exchange import Exchange
from client.session import WITHDRAWAL_TIMEOUT_S, Session

_END_TIMEOUT_S = 1.0  # of calls that are cancelled here, which asks nobody

T = TypeVar("T")


class ReadTimer:
    """Cancels a stream that is silent while it is read. A thread in the block, if there is a limit.

    Args:
        seconds: how long one read may take; infinite for no limit.
        cancel: ends the stream, so that the read returns.

    Attributes:
        expired: whether `cancel` was called.
    """

    def __init__(self, seconds: float, cancel: Callable[[], object]) -> None:
        self.expired = False
        self._seconds = seconds
        self._cancel = cancel
        self._changed = threading.Condition()
        self._due: float | None = math.inf  # None: the block has ended
        self._thread = threading.Thread(target=self._watch, name="trident-read-timer", daemon=True)

    def next(self, stream: Iterator[T]) -> T | None:
        """Return the next message of `stream`, or None at its end."""
        if self._seconds == math.inf:
            return next(stream, None)
        self._set(time.monotonic() + self._seconds)
        try:
            return next(stream, None)
        finally:
            self._set(math.inf)

    def __enter__(self) -> Self:
        if self._seconds != math.inf:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._set(None)

    def _set(self, due: float | None) -> None:
        with self._changed:
            self._due = due
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while self._due is not None:
                left = self._due - time.monotonic()
                if left <= 0:
                    self.expired = True
                    self._cancel()
                    return
                self._changed.wait(min(left, threading.TIMEOUT_MAX))


class Transport:
    """Sends and receives for an `Exchange`, over one channel; for any number of threads at once.

    The channel is made by the first request: gRPC does not survive a fork.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._opening = threading.Lock()
        self._open: _Open | None = None
        self._closed = threading.Event()

    def run(self, exchange: Exchange[T]) -> Generator[T, None, None]:
        """Yield the answer to `exchange`, over as many attempts as it allows.

        Raises:
            TridentClientError: the last attempt failed.
        """
        exchange.start()
        try:
            while True:
                try:
                    self._withdraw_before_retry(exchange)
                    yield from self._attempt(exchange)
                    return
                except TridentClientError as error:
                    delay = exchange.delay_before_retry(error)
                    if delay is None:
                        raise
                if self._closed.wait(delay):
                    raise exchange.ended_here()
        except SystemExit:  # there is no time left to ask the server for anything
            raise
        except BaseException:
            self._withdraw(exchange)
            raise

    def ask(self, method: str, message: Any, exchange: Exchange[Any]) -> Any:
        """Make a call that has one answer, within the time of `exchange`.

        Raises:
            TridentClientError: it failed.
        """
        try:
            return getattr(self._opened().stub, method)(message, **self._options(exchange))
        except grpc.RpcError as error:
            raise exchange.error(error) from None
        except ValueError:
            if self._closed.is_set():  # which gRPC calls a ValueError
                raise exchange.ended_here() from None
            raise

    def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._closed.set()
        with self._opening:
            if self._open is not None:
                self._open.channel.close()

    def _attempt(self, exchange: Exchange[T]) -> Generator[T, None, None]:
        call, answered = None, threading.Event()
        try:
            message = exchange.message(batched=self._takes_batches(exchange))
            # One stream per request: an error on a shared one would not name its request.
            opened = self._opened()
            call = opened.stub.ModelStreamInfer(
                _held_open(message, answered), **self._options(exchange)
            )
            opened.calls.add(call)
            with ReadTimer(exchange.read_timeout, call.cancel) as timer:
                while not exchange.complete:
                    try:
                        reply = timer.next(call)
                    except grpc.RpcError:
                        if timer.expired:
                            raise exchange.silent() from None
                        raise
                    if reply is None:
                        raise exchange.unfinished()
                    yield from exchange.read(reply)
        except GeneratorExit:
            if self._withdraw(exchange) and call is not None:
                _drain(call, exchange)
            raise
        except (grpc.RpcError, TridentClientError) as error:
            if call is not None and call not in opened.calls:
                raise SystemExit from None  # a daemon thread, in a program that ends
            raise exchange.failed(error) from None
        except ValueError:
            if self._closed.is_set():  # which gRPC calls a ValueError
                raise exchange.ended_here() from None
            raise
        finally:
            if call is not None:
                _end(call, answered, exchange.complete)

    def _withdraw_before_retry(self, exchange: Exchange[Any]) -> None:
        """Ask the server to end an earlier attempt that may still be running.

        Raises:
            UnavailableError: it does not answer.
        """
        if (withdrawal := self._session.withdrawal(exchange)) is None:
            return
        try:
            for _ in self.run(withdrawal):
                pass
        except RequestTimeoutError:
            raise exchange.still_away() from None
        except UnavailableError:
            raise
        except TridentClientError:
            pass  # a server that does not end requests by their id
        exchange.may_be_running = False

    def _withdraw(self, exchange: Exchange[Any]) -> bool:
        """Ask the server to end a request; return whether it did in time."""
        withdrawal = self._session.withdrawal(exchange)
        # While the interpreter ends, no thread is left that could bring an answer.
        if withdrawal is None or self._closed.is_set() or sys.is_finalizing():
            return False
        exchange.may_be_running = False
        with suppress(TridentClientError):
            for _ in self.run(withdrawal):
                pass
            return True
        return False

    def _takes_batches(self, exchange: Exchange[Any]) -> bool:
        if self._session.batched is not None:
            return self._session.batched
        config = self.ask("ModelConfig", self._session.config_request(), exchange)
        return self._session.learn(config)

    def _options(self, exchange: Exchange[Any]) -> dict[str, Any]:
        headers = self._session.connection.headers
        return {"timeout": exchange.time_left(), "metadata": headers}

    def _opened(self) -> _Open:
        with self._opening:
            if self._closed.is_set():
                raise RequestCancelledError("the client is closed")
            if self._open is None:
                self._open = _Open(_channel(self._session.connection))
                weakref.finalize(self, self._open.end)  # the end of the program is one of its times
            if self._open.process != os.getpid():
                raise ConfigurationError(
                    "make a new client in this process",
                    param="the client was used before this process was forked",
                )
            return self._open


class _Open:
    """A channel, its stub, the calls on it and the process that made it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.process = os.getpid()
        self.calls = weakref.WeakSet[grpc.Call]()

    def end(self) -> None:
        """Cancel calls that are still open, and wait until gRPC's threads have done so.

        When a program ends, these threads are stopped wherever they are. One that holds the lock of
        a call then would keep the program for ever, which takes the lock to release the call.
        """
        if self.process != os.getpid():
            return
        cancelled = []
        for call in list(self.calls):
            ended = threading.Event()
            if call.add_callback(ended.set):
                self.calls.discard(call)
                call.cancel()
                cancelled.append(ended)
        deadline = time.monotonic() + _END_TIMEOUT_S
        for ended in cancelled:
            ended.wait(max(0.0, deadline - time.monotonic()))


def _channel(to: Connection) -> grpc.Channel:
    if to.credentials is None:
        return grpc.insecure_channel(to.url, to.options)
    return grpc.secure_channel(to.url, to.credentials, to.options)


def _held_open(
    message: service_pb2.ModelInferRequest, answered: threading.Event
) -> Iterator[service_pb2.ModelInferRequest]:
    """Yield the request, and end the stream only when it has been answered.

    tritonserver 24.10 overlooks some cancellations of a stream whose client has said so before.
    """
    yield message
    answered.wait()


def _drain(call: grpc.Call, exchange: Exchange[Any]) -> None:
    """Read the stream of a withdrawn request to its end, for a limited time."""
    with _limited(call), suppress(grpc.RpcError, TridentClientError):
        for reply in call:
            exchange.skip(reply)
            if exchange.complete:
                break


def _end(call: grpc.Call, answered: threading.Event, complete: bool) -> None:
    """Cancel an incomplete call; the server ends a complete one, which a late cancel disturbs."""
    if not complete:
        call.cancel()
    answered.set()  # releases the thread that sends the requests
    if complete:
        with _limited(call), suppress(grpc.RpcError):
            for _ in call:
                pass


@contextmanager
def _limited(call: grpc.Call) -> Iterator[None]:
    """Cancel `call` if the block lasts longer than `WITHDRAWAL_TIMEOUT_S`."""
    timer = threading.Timer(WITHDRAWAL_TIMEOUT_S, call.cancel)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
