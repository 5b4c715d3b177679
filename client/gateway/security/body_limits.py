"""BodyLimits: bounds the size of requests, and the time that they take to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.gateway.errors import ApiError

MAX_BODY_BYTES = 10 * 2**20
MAX_HEAD_BYTES = 2**16
MAX_BUFFERED_BYTES = 256 * 2**20  # of all connections of a gateway
BODY_TIMEOUT_S = 60.0
_UNCOUNTED_BYTES = 2**16
_RETRY_AFTER_S = 1


class BodyLimits:
    """Reads the body of a request before anyone else does: all of it, soon, and not too much.

    Bodies count until their requests are answered. The first 64 KiB of each do not: while others
    hold all that there is, small requests are still let in.
    """

    def __init__(
        self,
        app: ASGIApp,
        timeout: float = BODY_TIMEOUT_S,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        """Take the application.

        Args:
            timeout: seconds from the head to the end of the body.
            max_buffered_bytes: of the bodies of all connections together.
        """
        self._app = app
        self._timeout = timeout
        self._max_buffered_bytes = max_buffered_bytes
        self._num_buffered_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._room() as take:
            try:
                _check_head(scope)
                body = await self._body(receive, take)
            except ApiError as error:
                response = error.response(scope)
                if error.status == 408:
                    response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
            if body is not None:
                await self._app(scope, _Replay(body, receive), send)

    async def _body(self, receive: Receive, take: Callable[[int], None]) -> bytes | None:
        """Return the body; None if the client has gone.

        Args:
            take: called with the size of the body so far.

        Raises:
            ApiError: it is too large, or does not come, or there is no room for it.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > MAX_BODY_BYTES:
                        raise _too_large()
                    take(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                f"the body did not arrive within {self._timeout:g} s", code="timeout"
            ) from None

    @contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """Yield what takes room for a body of a size, until the block ends."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            more = max(0, size - _UNCOUNTED_BYTES) - taken
            taken += more
            self._num_buffered_bytes += more
            if more and self._num_buffered_bytes > self._max_buffered_bytes:
                raise self._full()

        try:
            yield take
        finally:
            self._num_buffered_bytes -= taken

    def _full(self) -> ApiError:
        return ApiError(
            f"the bodies of all requests have more than {self._max_buffered_bytes} bytes; try "
            "again later",
            code="unavailable",
            retry_after=_RETRY_AFTER_S,
        )


class _Replay:
    """The messages of a request whose body has been read."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _check_head(scope: Scope) -> None:
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
        raise ApiError(
            f"the headers must not have more than {MAX_HEAD_BYTES} bytes",
            code="too_large",
            status=431,
        )
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()


def _too_large() -> ApiError:
    return ApiError(f"the body must not have more than {MAX_BODY_BYTES} bytes", code="too_large")
