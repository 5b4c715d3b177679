"""BufferedSocket: a TCP connection that does not block, with what is still to be written to it."""

from __future__ import annotations

import socket

_READ = 2**18


class BufferedSocket:
    """One connection of a load generator, which has many of them and one thread."""

    def __init__(self, host: str, port: int) -> None:
        """Connect."""
        self.socket = socket.create_connection((host, port))
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._outgoing = bytearray()

    @property
    def wants_to_write(self) -> bool:
        """Whether `write` has something to do."""
        return bool(self._outgoing)

    def write(self) -> None:
        """Write what fits into the socket's buffer."""
        try:
            del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the connection: the server cancels what it asked for."""
        self.socket.close()

    def _receive(self) -> bytes | None:
        """Return what has arrived, empty at the connection's end; None if nothing has."""
        try:
            return self.socket.recv(_READ)
        except BlockingIOError:
            return None
