"""Exchange: one request and its answer, over as many attempts as it takes, without any I/O."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import grpc
from tritonclient.grpc import service_pb2

from client.errors import (
    ReadTimeoutError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerError,
    TridentClientError,
    UnavailableError,
    from_connection,
    from_status,
    from_text,
)
from client.request import Request
from client.retry import RetryPolicy

T = TypeVar("T")

_ENDLESS_S = 1e9  # more than gRPC can count: no limit
# What gRPC's asyncio has for a request that it could not write, with the status INTERNAL.
_BROKEN_WHILE_SENT = "Internal error from Core"
# After these the server may still be working on the request.
_LEFT_RUNNING = (UnavailableError, ReadTimeoutError, ServerError)


class Exchange(Generic[T]):
    """Makes every decision about one request; `TridentClient` and `AsyncTridentClient` do the I/O.

    For each attempt they send `message` on a stream of its own, hand each response to `read` until
    `complete`, or call `unfinished` if the stream ends before. They cancel a call that is not
    complete, and let the server end one that is. What is raised goes to `failed`, and its result
    to `delay_before_retry`. Before the next attempt, and when they give up, they send `withdrawal`
    if `may_be_running`.

    Attributes:
        complete: nothing more follows in this attempt.
        may_be_running: the server may be working on an attempt.
        withdrawal: the request that ends this one on the server, if there is such a request.
        read_timeout: seconds for each response after the one before; infinite for no limit.
    """

    def __init__(
        self,
        request: Request,
        read: Callable[[service_pb2.ModelInferResponse], Iterable[T]],
        *,
        url: str,
        total: float,
        read_timeout: float,
        retry: RetryPolicy | None,
        withdrawal: Request | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Set everything up; the time runs from `start` on.

        Args:
            read: takes a response apart.
            url: the server's, for errors.
            total: seconds for all attempts and the pauses between them; infinite for no limit.
            retry: None never tries again.
        """
        self.complete = False
        self.may_be_running = False
        self.withdrawal = withdrawal
        self.read_timeout = read_timeout if read_timeout < _ENDLESS_S else math.inf
        self._request = request
        self._read = read
        self._url = url
        self._clock = clock
        self._has_begun = False  # a piece of the answer has come
        self._delays = iter(()) if retry is None else retry.delays(chance)
        self._timeout = total if total < _ENDLESS_S else math.inf
        self._deadline = math.inf

    def start(self) -> None:
        """Start the clock."""
        self._deadline = self._clock() + self._timeout

    def time_left(self) -> float | None:
        """Return the seconds until the deadline; None without one.

        Raises:
            RequestTimeoutError: there are none.
        """
        left = self._seconds_left()
        if left <= 0:
            raise _timed_out()
        return None if left == math.inf else left

    def message(self, *, batched: bool) -> service_pb2.ModelInferRequest:
        """Begin an attempt: return what to send.

        Raises:
            RequestTimeoutError: there is no time left for it.
        """
        message = self._request.message(batched=batched, timeout=self.time_left())
        self.complete = False
        self.may_be_running = True
        return message

    def read(self, response: service_pb2.ModelStreamInferResponse) -> list[T]:
        """Return what a response holds.

        Raises:
            TridentClientError: it is an error.
        """
        self.note(response)
        return self.take_apart(response)

    def note(self, response: service_pb2.ModelStreamInferResponse) -> None:
        """Note the request's state in a response, as `read` does.

        Raises:
            TridentClientError: it is an error.
        """
        if response.error_message:
            self.complete, self.may_be_running = True, False
            raise from_text(response.error_message)
        inner = response.infer_response
        self.complete = inner.parameters["triton_final_response"].bool_param
        self.may_be_running = not self.complete
        self._has_begun |= bool(inner.outputs)

    def take_apart(self, response: service_pb2.ModelStreamInferResponse) -> list[T]:
        """Return what a response holds that has been noted; any thread may do that.

        Raises:
            ServerError: it cannot be read.
        """
        return list(self._read(response.infer_response))

    def skip(self, response: service_pb2.ModelStreamInferResponse) -> None:
        """Discard a response of a request that has been withdrawn."""
        is_final = response.infer_response.parameters["triton_final_response"].bool_param
        self.complete = is_final or bool(response.error_message)

    def unfinished(self) -> UnavailableError:
        """Return the error for a stream that ends before its final response."""
        return UnavailableError("the server ended the answer before it was complete")

    def still_away(self) -> UnavailableError:
        """Return the error for a withdrawal that was not answered in time."""
        return UnavailableError(f"the server at {self._url} does not answer")

    def silent(self) -> ReadTimeoutError:
        """Return the error for a stream that was silent for longer than `read_timeout`."""
        return ReadTimeoutError(
            f"the server sent no piece of the answer for {self.read_timeout:g} s"
        )

    def failed(self, error: grpc.RpcError | TridentClientError) -> TridentClientError:
        """Record that the attempt has ended with `error`; return it as a `TridentClientError`."""
        known = self.error(error) if isinstance(error, grpc.RpcError) else error
        self.may_be_running = self.may_be_running and type(known) in _LEFT_RUNNING
        return known

    def delay_before_retry(self, error: TridentClientError) -> float | None:
        """Return for how many seconds to pause before the next attempt; None: there is none.

        `error` is not raised here: it would keep this frame, which keeps it.
        """
        if isinstance(error, UnavailableError) and not self._has_begun:
            delay = next(self._delays, None)
            if delay is not None and self._clock() + delay < self._deadline:
                return delay
        return None

    def error(self, error: grpc.RpcError) -> TridentClientError:
        """Return our error for one of gRPC."""
        status, details = error.code().name, error.details() or ""
        if status == "DEADLINE_EXCEEDED":
            return _timed_out()
        # A deadline that passes while the request is being written is an "internal error".
        if status == "CANCELLED" or self._seconds_left() <= 0:
            return self.ended_here()
        if status == "UNAVAILABLE":
            return from_connection(details, self._url)
        if details == _BROKEN_WHILE_SENT:
            return from_connection("the connection broke while it was asked", self._url)
        return from_status(status, details)

    def ended_here(self) -> TridentClientError:
        """Return the error for a call that was ended on this side, by time or by `close`."""
        if self._seconds_left() <= 0:
            return _timed_out()
        return RequestCancelledError("the request was cancelled")

    def _seconds_left(self) -> float:
        return self._deadline - self._clock()


def _timed_out() -> RequestTimeoutError:
    return RequestTimeoutError("the request took longer than its timeout")
