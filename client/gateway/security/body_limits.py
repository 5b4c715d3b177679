"""BodyLimits: bounds the size of requests, and the time that they take to arrive."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.gateway.errors import ApiError

MAX_BODY_BYTES = 10 * 2**20
MAX_HEAD_BYTES = 2**16
BODY_TIMEOUT_S = 60.0


class BodyLimits:
    """Reads the body of a request before anyone else does: all of it, soon, and not too much."""

    def __init__(self, app: ASGIApp, timeout: float = BODY_TIMEOUT_S) -> None:
        """Take the application.

        Args:
            timeout: seconds from the head to the end of the body.
        """
        self._app = app
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check_head(scope)
            body = await self._body(receive)
        except ApiError as error:
            response = error.response(scope)
            if error.status == 408:
                response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _Replay(body, receive), send)

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body; None if the client has gone.

        Raises:
            ApiError: it is too large, or does not come.
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
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._timeout:g} s",
                "timeout_error",
                code="timeout",
            ) from None


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
            431, f"the headers must not have more than {MAX_HEAD_BYTES} bytes", code="too_large"
        )
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()


def _too_large() -> ApiError:
    return ApiError(
        413, f"the body must not have more than {MAX_BODY_BYTES} bytes", code="too_large"
    )
