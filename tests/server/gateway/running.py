"""A gateway on a free port, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from client.gateway.processes.server import make_server
from client.gateway.settings import GatewaySettings
from engine.launch.ports import pick_free


@contextmanager
def running(settings: GatewaySettings) -> Iterator[str]:
    """Yield its `host:port`."""
    (port,) = pick_free(1)
    server = make_server(settings, "127.0.0.1", port)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
