"""Waits for servers of tests."""

import socket
import time


def wait_for_port(port: int, *, seconds: float = 30.0) -> None:
    """Return when something listens."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < end, "nothing listens"
            time.sleep(0.05)
