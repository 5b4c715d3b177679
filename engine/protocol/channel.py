"""Channel: typed messages over a connected socket, each a length-prefixed msgpack frame."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

_HEADER = struct.Struct("<I")  # payload length in bytes
MAX_FRAME_BYTES = 256 * 2**20
# A writable socket takes them without waiting: it has three quarters of its buffer free, whose
# default size is 208 KiB (`unix_writable` in Linux's net/unix/af_unix.c).
_SMALL_FRAME_BYTES = 64 * 2**10

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class ChannelError(Exception):
    """The other end sent an invalid frame or ended inside one, or a message cannot be encoded."""


class Channel(Generic[Sent, Received]):
    """One end of a stream socket. Any thread may send; one thread receives.

    The channel owns the socket, and closes it.
    """

    def __init__(self, sock: socket.socket, received: Any) -> None:
        """Wrap `sock`; `received` is the message type (or union) that the other end sends."""
        self._socket = sock
        self._reader = sock.makefile("rb", buffering=2**16)
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)

    def send(self, message: Sent) -> None:
        """Block until `message` is in the socket's buffer.

        Raises:
            ChannelError: the message is larger than `MAX_FRAME_BYTES` or holds an integer that is
                too large; nothing was sent.
            OSError: the other end has gone.
        """
        frame = self._frame(message)
        with self._send_lock:
            self._socket.sendall(frame)

    def send_at_once(self, message: Sent) -> bool:
        """Send `message` if that needs no waiting, and return whether it was sent.

        Only one thread may send at a time.

        Raises:
            ChannelError, OSError: as from `send`.
        """
        frame = self._frame(message)
        if len(frame) > _SMALL_FRAME_BYTES or not self._poll.poll(0):
            return False
        self._socket.sendall(frame)
        return True

    def receive(self) -> Received | None:
        """Block for the next message; None when the other end has closed between two of them.

        Raises:
            ChannelError: the stream ended inside a frame, or a frame is too long or malformed.
        """
        header = self._read(_HEADER.size)
        if not header:
            return None
        (length,) = _HEADER.unpack(self._whole(header, _HEADER.size))
        if length > MAX_FRAME_BYTES:
            raise ChannelError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        payload = self._whole(self._read(length), length)
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ChannelError(f"a frame is malformed: {error}") from None

    def shutdown(self) -> None:
        """Shut the socket down; a thread blocked in `receive` returns. Repeatable."""
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; no thread may be in `receive` any more. Repeatable."""
        self.shutdown()
        self._reader.close()  # holds the file descriptor too
        self._socket.close()

    def _frame(self, message: Sent) -> bytes:
        try:
            payload = self._encoder.encode(message)
        except OverflowError as error:
            raise ChannelError(f"a message cannot be encoded: {error}") from None
        if len(payload) > MAX_FRAME_BYTES:
            raise ChannelError(
                f"a message of {len(payload)} bytes exceeds the {MAX_FRAME_BYTES} of a frame"
            )
        return _HEADER.pack(len(payload)) + payload

    def _read(self, size: int) -> bytes:
        """Return `size` bytes, fewer only at the end of the stream."""
        try:
            data: bytes = self._reader.read(size)
            return data
        except (ConnectionResetError, ValueError):  # killed peer; closed by ourselves
            return b""

    @staticmethod
    def _whole(data: bytes, size: int) -> bytes:
        if len(data) < size:
            raise ChannelError("the stream ended inside a frame")
        return data
