"""BoundedHttpProtocol: uvicorn's HTTP, with bounds on what comes before an application is asked."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from client.gateway.security.body_limits import MAX_HEAD_BYTES

_REFUSAL = "HTTP/1.1 {}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection that ends if a request's head is too long, or too long in coming.

    One whose request was answered before its body had come has `LINGER_S` for the rest, so that a
    client which sends first and reads then still reads the answer.
    """

    HEAD_TIMEOUT_S = 10.0
    LINGER_S = 10.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._in_head = True
        self._in_body = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._close_in(self.HEAD_TIMEOUT_S)  # without a word: browsers connect ahead of need

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stay()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        goes_on = self._in_head  # one that begins among these bytes is not all of them
        super().data_received(data)
        if goes_on and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._close("431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """Begin to read a head."""
        super().on_message_begin()
        self._head_bytes, self._in_head = 0, True
        self._close_in(self.HEAD_TIMEOUT_S, "408 Request Timeout")

    def on_headers_complete(self) -> None:
        """Hand the request to the application."""
        self._in_head, self._in_body = False, True
        self._stay()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note the end of the body."""
        self._in_body = False
        self._stay()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note the end of the answer."""
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._close_in(self.LINGER_S)

    def _close_in(self, seconds: float, status: str | None = None) -> None:
        self._stay()
        self._timer = self.loop.call_later(seconds, self._close, status)

    def _stay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self, status: str | None) -> None:
        if not self.transport.is_closing():
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if status is not None and not is_answering:
                self.transport.write(_REFUSAL.format(status).encode())
            self.transport.close()
