"""TridentClient: prompts in, text out, over gRPC."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client.connection import SSLOptions, connection
from client.errors import InvalidRequestError, TridentClientError
from client.exchange import Exchange
from client.protocol import Chunk, Completion, Health, Message, SamplingOptions
from client.response import Collector
from client.retry import DEFAULT_RETRY, RetryPolicy
from client.session import WITHDRAWAL_TIMEOUT_S, Session, only

T = TypeVar("T")


class TridentClient:
    """Talks to one server; safe to use from several threads at once. A context manager.

        with TridentClient("localhost:8001") as client:
            print(client.generate("Once upon a time", max_tokens=64).text)

    Args:
        url: `host:port` of the server's gRPC service. Nothing is sent before the first request.
        ssl: True for TLS with gRPC's certificates, `SSLOptions` for your own, False for none.
        headers: sent with each call, such as `authorization`.
        retry: how a request is tried again when the server is away or full; None: never.

    Raises:
        ConfigurationError: a certificate cannot be read, or a header cannot be sent.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        *,
        ssl: bool | SSLOptions = False,
        headers: Mapping[str, str] = {},
        retry: RetryPolicy | None = DEFAULT_RETRY,
    ) -> None:
        to = connection(url, ssl, headers)
        self._session = Session(to, retry)
        self._channel = (
            grpc.insecure_channel(url, to.options)
            if to.credentials is None
            else grpc.secure_channel(url, to.credentials, to.options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._closed = threading.Event()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        stream: bool = False,
        timeout: float | None = None,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Complete a prompt, or answer chat messages, and return the whole.

        Args:
            prompt: text to go on from, as it stands.
            messages: a chat as a list of `{"role": ..., "content": ...}`, instead of a prompt.
            stream: receive it piece by piece, which measures the time to the first token.
            timeout: seconds until the request is given up and cancelled, further tries included;
                None waits.
            request_id: what the server calls it, and `cancel`; to be unique.
            **sampling: see `SamplingOptions`.

        Raises:
            TridentClientError: see `client.errors`.
        """
        collector = Collector(streamed=stream)
        exchange = self._session.completion(
            prompt, messages, sampling, stream=stream, timeout=timeout, request_id=request_id
        )
        with closing(self._run(exchange)) as chunks:
            for chunk in chunks:
                collector.add(chunk)
        return collector.completion()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout: float | None = None,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Chunk, None, None]:
        """Yield the answer piece by piece; the arguments are those of `generate`.

        The request is sent when the first piece is asked for. Leaving the loop early, or closing
        the generator, cancels it on the server.
        """
        return self._run(
            self._session.completion(
                prompt, messages, sampling, stream=True, timeout=timeout, request_id=request_id
            )
        )

    def cancel(self, request_id: str, timeout: float | None = 5.0) -> None:
        """End the requests of that id, whoever sent them; an unknown id is no error.

        Each is answered with what it has, and the finish reason `abort`.
        """
        list(self._run(self._session.stop(request_id, timeout)))

    def health(self, timeout: float | None = 5.0) -> Health:
        """Return how the engine is.

        Raises:
            UnavailableError: it takes no requests, or no server answers; the text says why.
            TridentClientError: the server could not be asked.
        """
        exchange = self._session.health(timeout)
        try:
            return only(list(self._run(exchange)))
        except InvalidRequestError:  # it knows no such question
            ready = self._ask(self._stub.ModelReady, self._session.ready_request(), exchange)
            return self._session.health_of(ready)

    def is_ready(self, timeout: float | None = 5.0) -> bool:
        """Tell whether the server answers and its engine takes requests."""
        try:
            return self.health(timeout).is_ready
        except TridentClientError:
            return False

    def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, exchange: Exchange[T]) -> Generator[T, None, None]:
        """Do the I/O of `exchange`: see there."""
        exchange.start()
        while True:
            call, answered = None, threading.Event()
            try:
                message = exchange.message(batched=self._takes_batches(exchange))
                # One stream per request: an error on a shared one would not say whose it is.
                call = self._stub.ModelStreamInfer(
                    _held_open(message, answered), **self._options(exchange)
                )
                for reply in call:
                    yield from exchange.read(reply)
                    if exchange.complete:
                        return
                raise exchange.unfinished()
            except (grpc.RpcError, TridentClientError) as error:
                delay = exchange.delay_before_retry(error)
            except GeneratorExit:
                if call is not None:
                    self._withdraw(exchange, call)
                raise
            except KeyboardInterrupt:
                if call is not None:
                    self._withdraw(exchange, None)  # gRPC cannot go on reading where it broke off
                raise
            except ValueError:
                if self._closed.is_set():  # which gRPC calls a ValueError
                    raise exchange.ended_here() from None
                raise
            finally:
                if call is not None:
                    _end(call, answered, exchange.complete)
            if self._closed.wait(delay):
                raise exchange.ended_here()

    def _withdraw(self, exchange: Exchange[Any], call: grpc.Call | None) -> None:
        """Have the server end a request whose answer nobody wants, if that is soon done.

        Args:
            call: read to its end, if it can be.
        """
        withdrawal = self._session.withdraw(exchange)
        # While the interpreter ends, no thread is left that could bring an answer.
        if withdrawal is None or sys.is_finalizing():
            return
        with suppress(grpc.RpcError, TridentClientError):
            list(self._run(withdrawal))
        if call is None:
            return
        giving_up = threading.Timer(WITHDRAWAL_TIMEOUT_S, call.cancel)
        giving_up.start()
        try:
            with suppress(grpc.RpcError, TridentClientError):
                for reply in call:
                    exchange.read(reply)
                    if exchange.complete:
                        break
        finally:
            giving_up.cancel()

    def _takes_batches(self, exchange: Exchange[Any]) -> bool:
        if self._session.batched is not None:
            return self._session.batched
        config = self._ask(self._stub.ModelConfig, self._session.config_request(), exchange)
        return self._session.learn(config)

    def _ask(self, method: Callable[..., Any], message: Any, exchange: Exchange[Any]) -> Any:
        try:
            return method(message, **self._options(exchange))
        except grpc.RpcError as error:
            raise exchange.error(error) from None

    def _options(self, exchange: Exchange[Any]) -> dict[str, Any]:
        headers = self._session.connection.headers
        return {"timeout": exchange.time_left(), "metadata": headers}


def _held_open(
    message: service_pb2.ModelInferRequest, answered: threading.Event
) -> Iterator[service_pb2.ModelInferRequest]:
    """Yield the request, and say that there are no more only when it has been answered.

    tritonserver 24.10 overlooks some cancellations of a stream whose client has said so before.
    """
    yield message
    answered.wait()


def _end(call: grpc.Call, answered: threading.Event, complete: bool) -> None:
    """Cancel what is not complete; let the server end what is, for a late cancel disturbs it."""
    if not complete:
        call.cancel()
    answered.set()  # releases the thread that sends the requests
    if complete:
        with suppress(grpc.RpcError):
            for _ in call:
                pass
