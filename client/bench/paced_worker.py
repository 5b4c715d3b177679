"""`python -m client.bench.paced_worker`: streams requests, started by `client.bench.paced`.

Reads the requests as one JSON line from stdin, and writes a line when each stream has been answered
once. The next line on stdin ends it: it writes when which tokens arrived.
"""

from __future__ import annotations

import base64
import json
import selectors
import sys
import time
from contextlib import closing
from typing import Any

from tritonclient.grpc import service_pb2

from client.bench.errors import BenchError
from client.bench.load.http2 import Http2Connection
from client.errors import TridentClientError
from client.response import read_chunks

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

Arrival = tuple[int, float, bytes]  # stream, time.monotonic() second, message


class Streams:
    """Requests in flight, over connections of `per_connection` streams each."""

    def __init__(self, host: str, port: int, messages: list[bytes], *, per_connection: int) -> None:
        """Send all requests."""
        self._selector = selectors.DefaultSelector()
        self._arrivals: list[Arrival] = []
        self._answered: set[int] = set()
        self._connections: list[Http2Connection] = []
        self.num_streams = len(messages)
        for first in range(0, len(messages), per_connection):
            connection = Http2Connection(host, port, METHOD)
            self._connections.append(connection)
            for message in messages[first : first + per_connection]:
                connection.send(message)
            self._selector.register(connection.socket, selectors.EVENT_READ, (connection, first))
        self._selector.register(sys.stdin, selectors.EVENT_READ, None)

    def close(self) -> None:
        """Close the connections: the server cancels what still runs."""
        self._selector.close()
        for connection in self._connections:
            connection.close()

    def run(self, on_answered: Any) -> list[Arrival]:
        """Read until stdin has a line; `on_answered` is called when all streams have an answer."""
        waiting = True
        while True:
            for connection in self._connections:
                if connection.wants_to_write:
                    connection.write()
            writing = any(connection.wants_to_write for connection in self._connections)
            for key, _ in self._selector.select(0.01 if writing else None):
                if key.data is None:
                    return self._arrivals
                connection, first = key.data
                now = time.monotonic()
                for number, message in connection.read():
                    self._arrivals.append((first + number, now, message))
                    if waiting:
                        self._answered.add(first + number)
            if waiting and len(self._answered) == self.num_streams:
                waiting = False
                on_answered()


def tokens(arrivals: list[Arrival]) -> list[tuple[int, float, int, bool]]:
    """Return stream, time, number of new tokens, and whether it is the last, of each response.

    Raises:
        BenchError: a request failed.
    """
    found = []
    complete: set[int] = set()
    for stream, at, message in arrivals:
        if not message and stream not in complete:
            raise BenchError("the server ended a request without its answer")
        reply = service_pb2.ModelStreamInferResponse.FromString(message)
        if reply.error_message:
            raise BenchError(f"a request failed: {reply.error_message}")
        chunks = list(read_chunks(reply.infer_response))
        count = sum(chunk.num_output_tokens for chunk in chunks)
        is_last = any(chunk.finish_reason is not None for chunk in chunks)
        if is_last:
            complete.add(stream)
        if count:
            found.append((stream, at, count, is_last))
    return found


def main() -> None:
    """Stream until the second line."""

    def say(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    task = json.loads(sys.stdin.readline())
    messages = [base64.b64decode(message) for message in task["requests"]]
    try:
        streams = Streams(
            task["host"], task["port"], messages, per_connection=task["per_connection"]
        )
        with closing(streams):
            arrivals = streams.run(lambda: say(answered=len(messages)))
        say(arrivals=tokens(arrivals))
    except (TridentClientError, OSError) as error:
        say(error=str(error))


if __name__ == "__main__":
    main()
