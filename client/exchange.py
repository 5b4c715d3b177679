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
    InvalidRequestError,
    RequestCancelledError,
    RequestTimeoutError,
    TridentClientError,
    UnavailableError,
    from_connection,
    from_status,
    from_text,
)
from client.request import Request
from client.retry import RetryPolicy

T = TypeVar("T")

_ENDLESS_S = 1e9  # no timeout in earnest, and more than gRPC can count


class Exchange(Generic[T]):
    """Makes every decision about one request; `TridentClient` and its async twin do the I/O.

    For each attempt they send `message` on a stream of its own, hand each response to `read` until
    `complete`, or call `unfinished` if the stream ends before. They cancel a call that is not
    complete, and let the server end one that is. Whatever is raised goes to `delay_before_retry`.

    Attributes:
        complete: nothing more follows in this attempt.
        is_open: an attempt has begun and may still be answered.
        withdrawal: the request that takes this one back, if that cannot meet another.
    """

    def __init__(
        self,
        request: Request,
        read: Callable[[service_pb2.ModelInferResponse], Iterable[T]],
        *,
        url: str,
        timeout: float | None,
        retry: RetryPolicy | None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Set everything up; the timeout runs from `start` on.

        Args:
            read: takes a response apart.
            url: the server's, for errors.
            timeout: seconds for all attempts and the pauses between them, or None.
            retry: None never tries again.
        """
        if timeout is not None and math.isnan(timeout):
            raise InvalidRequestError("timeout: must be a number of seconds")
        self.complete = False
        self.is_open = False
        self.withdrawal: Request | None = None
        self._request = request
        self._read = read
        self._url = url
        self._clock = clock
        self._has_begun = False  # of the answer, something has been seen
        self._delays = iter(()) if retry is None else retry.delays(chance)
        self._timeout = math.inf if timeout is None or timeout >= _ENDLESS_S else timeout
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
        self.complete = False
        self.is_open = True
        return self._request.message(batched=batched, timeout=self.time_left())

    def read(self, response: service_pb2.ModelStreamInferResponse) -> list[T]:
        """Return what a response holds.

        Raises:
            TridentClientError: it is an error.
        """
        if response.error_message:
            self.complete, self.is_open = True, False
            raise from_text(response.error_message)
        inner = response.infer_response
        self.complete = inner.parameters["triton_final_response"].bool_param
        self.is_open = not self.complete
        self._has_begun |= bool(inner.outputs)
        return list(self._read(inner))

    def unfinished(self) -> UnavailableError:
        """Return the error for a stream that ends before its final response."""
        return UnavailableError("the server ended the answer before it was complete")

    def delay_before_retry(self, error: grpc.RpcError | TridentClientError) -> float:
        """Return for how many seconds to pause before the next attempt.

        Raises:
            TridentClientError: `error`, in our words, is the end of it.
        """
        self.is_open = False
        known = self.error(error) if isinstance(error, grpc.RpcError) else error
        if isinstance(known, UnavailableError) and not self._has_begun:
            delay = next(self._delays, None)
            if delay is not None and self._clock() + delay < self._deadline:
                return delay
        raise known from None

    def error(self, error: grpc.RpcError) -> TridentClientError:
        """Return our error for one of gRPC."""
        status, details = error.code().name, error.details() or ""
        if status == "DEADLINE_EXCEEDED":
            return _timed_out()
        # A deadline that strikes while the request is being written comes as an "internal error".
        if status == "CANCELLED" or self._seconds_left() <= 0:
            return self.ended_here()
        if status == "UNAVAILABLE":
            return from_connection(details, self._url)
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
