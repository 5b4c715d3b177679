"""Reads many streams at once from sockets, and notes what arrived when."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from client.bench.errors import BenchError

_STALLED_S = 600.0

Arrival = tuple[float, bytes]  # time.perf_counter() second, message


class Connection(Protocol):
    """Streams over one socket, which does not block."""

    socket: socket.socket

    @property
    def wants_to_write(self) -> bool:
        """Whether `write` has something to do."""
        ...

    def write(self) -> None:
        """Write what fits."""
        ...

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the messages that have arrived, and of which of its streams; empty is an end."""
        ...

    def close(self) -> None:
        """Close the socket."""
        ...


def read_streams(
    connections: Sequence[Connection], sizes: Sequence[int], is_last: Callable[[bytes], bool]
) -> list[list[Arrival]]:
    """Write what is queued, and return what arrives by stream, until each has its last message.

    Args:
        connections: with their requests.
        sizes: how many streams each has.
        is_last: tells of a message whether it is the last of its stream.

    Raises:
        BenchError: a stream ended without it, or nothing arrives.
    """
    streams: list[list[list[Arrival]]] = [[[] for _ in range(size)] for size in sizes]
    num_left = sum(sizes)
    with selectors.DefaultSelector() as selector:
        for connection, arrivals in zip(connections, streams, strict=True):
            selector.register(connection.socket, selectors.EVENT_READ, (connection, arrivals))
        while num_left:
            writing = [each for each in connections if each.wants_to_write]
            for connection in writing:
                connection.write()
            ready = selector.select(0.01 if writing else _STALLED_S)
            if not ready and not writing:
                raise BenchError(f"nothing has arrived for {_STALLED_S:g} s")
            for key, _ in ready:
                connection, arrivals = key.data
                now = time.perf_counter()
                for number, message in connection.read():
                    stream = arrivals[number]
                    if message:
                        stream.append((now, message))
                        num_left -= is_last(message)
                    elif not stream or not is_last(stream[-1][1]):
                        raise BenchError("the server ended a request without its answer")
    return [stream for arrivals in streams for stream in arrivals]
