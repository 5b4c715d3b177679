"""Http2Connection: many gRPC streams on one socket, read at a small part of gRPC's cost in Python.

A load generator that shares its cores with the server must cost less than what it measures. This
one speaks as much HTTP/2 as a gRPC server needs, sends one message per stream, and hands out the
bytes of the answers.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from client.bench.errors import BenchError
from client.bench.load.connector import RequestFailedError

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _INITIAL_WINDOW_SIZE = 1, 2, 4
_DEFAULT_WINDOW = 65_535
_LARGEST_WINDOW = 2**31 - 1  # of all that is received: no updates are sent
_MAX_FRAME = 16_384
_READ = 2**18


class Http2Connection:
    """One connection, non-blocking.

    Streams are numbered from 0, in the order of `send`.
    """

    def __init__(self, host: str, port: int, path: str) -> None:
        """Connect; every stream calls the gRPC method `path`."""
        self.socket = socket.create_connection((host, port))
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._outgoing = bytearray()
        authority = f"{host}:{port}".encode()
        self._headers = b"".join(
            [
                b"\x83\x86",  # :method POST, :scheme http, from the static table
                b"\x04" + _text(path.encode()),
                b"\x01" + _text(authority),
                b"\x0f\x10" + _text(b"application/grpc"),  # content-type
                b"\x00" + _text(b"te") + _text(b"trailers"),
            ]
        )
        self._received = bytearray()
        self._messages: list[bytearray] = []  # by stream, bytes of a message that is not complete
        self._waiting: deque[bytes] = deque()  # request bodies that the window has no room for yet
        self._num_opened = 0
        self._window = self._stream_window = _DEFAULT_WINDOW
        settings = [(_HEADER_TABLE_SIZE, 0), (_ENABLE_PUSH, 0)]
        settings.append((_INITIAL_WINDOW_SIZE, _LARGEST_WINDOW))
        content = b"".join(struct.pack(">HI", *each) for each in settings)
        update = struct.pack(">I", _LARGEST_WINDOW - _DEFAULT_WINDOW)
        self._outgoing += _PREFACE
        self._outgoing += _frame(_SETTINGS, 0, 0, content) + _frame(_WINDOW_UPDATE, 0, 0, update)

    @property
    def wants_to_write(self) -> bool:
        """Whether `write` has something to do."""
        return bool(self._outgoing)

    def write(self) -> None:
        """Write what fits into the socket's buffer."""
        with suppress(BlockingIOError):
            del self._outgoing[: self.socket.send(self._outgoing)]

    def close(self) -> None:
        """Close the connection: the server cancels what it asked for."""
        self.socket.close()

    def send(self, message: bytes) -> int:
        """Queue a stream with one message, held open for the answers; return its number.

        Raises:
            RequestFailedError: the message is too large.
        """
        body = b"\x00" + struct.pack(">I", len(message)) + message
        if len(body) > min(_DEFAULT_WINDOW, self._stream_window):
            raise RequestFailedError(f"{len(message)} bytes are too large for this generator")
        self._messages.append(bytearray())
        self._waiting.append(body)
        self._open_streams()
        return len(self._messages) - 1

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the answers that have arrived: the number of the stream, and the message.

        An empty message is the end of the stream; there may be two.

        Raises:
            BenchError: the server has closed the connection.
        """
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return
        if not data:
            raise BenchError("the server closed the connection")
        received = self._received
        received += data
        start = 0
        while len(received) - start >= 9:
            length = int.from_bytes(received[start : start + 3], "big")
            if len(received) - start < 9 + length:
                break
            kind, flags = received[start + 3], received[start + 4]
            stream = int.from_bytes(received[start + 5 : start + 9], "big")
            content = bytes(received[start + 9 : start + 9 + length])
            start += 9 + length
            if kind == _DATA:
                yield from self._answers(stream // 2, _unpadded(flags, content))
            else:
                self._control(kind, flags, stream, content)
            ends = flags & _END_STREAM and kind in (_DATA, _HEADERS)
            if ends or kind == _RST_STREAM:
                yield stream // 2, b""
        del received[:start]

    def _answers(self, number: int, content: bytes) -> Iterator[tuple[int, bytes]]:
        message = self._messages[number]
        message += content
        while len(message) >= 5:
            end = 5 + int.from_bytes(message[1:5], "big")
            if len(message) < end:
                return
            yield number, bytes(message[5:end])
            del message[:end]

    def _control(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for name, value in struct.iter_unpack(">HI", content):
                if name == _INITIAL_WINDOW_SIZE:
                    self._stream_window = value
            self._outgoing += _frame(_SETTINGS, _ACK, 0, b"")
        elif kind == _PING and not flags & _ACK:
            self._outgoing += _frame(_PING, _ACK, 0, content)
        elif kind == _WINDOW_UPDATE and stream == 0:  # each stream sends less than its own window
            self._window += int.from_bytes(content, "big")
            self._open_streams()
        elif kind == _GOAWAY:
            raise BenchError("the server closes the connection")

    def _open_streams(self) -> None:
        while self._waiting and len(self._waiting[0]) <= self._window:
            body = self._waiting.popleft()
            self._window -= len(body)
            stream = 2 * self._num_opened + 1
            self._num_opened += 1
            self._outgoing += _frame(_HEADERS, _END_HEADERS, stream, self._headers)
            for start in range(0, len(body), _MAX_FRAME):
                self._outgoing += _frame(_DATA, 0, stream, body[start : start + _MAX_FRAME])


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def _text(value: bytes) -> bytes:
    """Return `value` as HPACK writes a string of less than 127 bytes."""
    assert len(value) < 127
    return bytes([len(value)]) + value


def _unpadded(flags: int, content: bytes) -> bytes:
    return content[1 : len(content) - content[0]] if flags & _PADDED else content
