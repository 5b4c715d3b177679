"""BoundedHttpProtocol: uvicorn's HTTP, with bounds on what comes before an application is asked."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from client.gateway.security.body_limits import MAX_HEAD_BYTES

_REFUSAL = "HTTP/1.1 {}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection that ends if a request's head is too long, or too long in coming.

    One whose request was answered before its body had come has `LINGER_S` for the rest, so that a
    client which sends first and reads then still reads the answer.

    Clients may offer to go on in another protocol, and need not be heard: Java's offers HTTP/2 with
    its first request.

    When it ends, all of its requests hear of that, also if others wait behind the one that is being
    answered.
    """

    HEAD_TIMEOUT_S = 10.0
    LINGER_S = 10.0
    MAX_PIPELINED = 16  # that are read behind the one being answered, to see the connection end

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _Parser(self)
        self._unanswered = deque[RequestResponseCycle]()
        self._head_bytes = 0
        self._in_head = True
        self._is_all_head = True  # what has come last; a head that ends there is followed by others
        self._in_body = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._close_in(self.HEAD_TIMEOUT_S)  # without a word: browsers connect ahead of need

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stay()
        super().connection_lost(exc)  # which notifies the last request alone
        for each in self._unanswered:
            each.disconnected = True
            each.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        self._is_all_head = self._in_head
        super().data_received(data)
        if self._is_all_head:
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
        if self.parser.should_upgrade():
            return  # it is read again without the offer
        self._in_head, self._is_all_head, self._in_body = False, False, True
        self._stay()
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if len(self._unanswered) <= self.MAX_PIPELINED:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """Note the end of the body."""
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._stay()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note the end of the answer."""
        self._unanswered.popleft()
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._close_in(self.LINGER_S)

    def without_offer(self) -> bytes:
        """Return the head that has been read without its offer of another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _close_in(self, seconds: float, status: str | None = None) -> None:
        self._stay()
        self._timer = self.loop.call_later(seconds, self._close, status)

    def _stay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self, status: str | None) -> None:
        if not self.transport.is_closing():
            if status is not None and not self._unanswered:
                self.transport.write(_REFUSAL.format(status).encode())
            self.transport.close()


class _Parser(HttpRequestParser):
    """The parser of a connection that stays with HTTP/1.1."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        """Read bytes; a head that offers another protocol as one that does not."""
        parser = self
        while True:
            try:
                return super(_Parser, parser).feed_data(data)
            except HttpParserUpgrade as offer:
                if parser.get_method() == b"CONNECT":  # is no offer
                    raise HttpParserError from None
                data = self._protocol.without_offer() + bytes(data[offer.args[0] :])
            parser = self._protocol.parser = _Parser(self._protocol)  # the old one reads no more
