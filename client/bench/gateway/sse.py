"""SseConnection: one stream of events over HTTP/1.1, read at a small part of a client's cost.

The counterpart of `Http2Connection`: a load generator that shares its cores with the server must
cost less than what it measures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from client.bench.buffered_socket import BufferedSocket
from client.bench.errors import BenchError

DONE = b"[DONE]"
_NAME = b"data: "


class SseConnection(BufferedSocket):
    """One connection, non-blocking, for one request."""

    def __init__(self, host: str, port: int, path: str, body: Any) -> None:
        """Connect, and queue the request."""
        super().__init__(host, port)
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        self._outgoing += head.encode() + content
        self._received = bytearray()
        self._in_head = True

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield 0 and what each event that has arrived says; nothing is the connection's end.

        Raises:
            BenchError: the server refuses the request.
        """
        data = self._receive()
        if data is None:
            return
        if not data:
            yield 0, b""
            return
        self._received += data
        if self._in_head:
            head, separator, rest = self._received.partition(b"\r\n\r\n")
            if not separator:
                return
            if not head.startswith(b"HTTP/1.1 200 "):
                length = re.search(rb"content-length: (\d+)", head)
                if length is None or len(rest) < int(length[1]):
                    return
                raise BenchError(f"a request was refused: {bytes(rest).decode(errors='replace')}")
            self._received, self._in_head = rest, False
        *events, self._received = self._received.split(b"\n\n")
        for event in events:  # before its name are the marks of HTTP's chunks
            yield 0, bytes(event[event.find(_NAME) + len(_NAME) :])
