"""A gateway on a free port, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from client.gateway.processes.server import make_server
from client.gateway.settings import GatewaySettings
from engine.launch.ports import pick_free
from tests.waiting import eventually


@contextmanager
def running(settings: GatewaySettings) -> Iterator[str]:
    """Yield its `host:port`."""
    (port,) = pick_free(1)
    server = make_server(settings, "127.0.0.1", port)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert eventually(lambda: server.started or not thread.is_alive(), 30)
        assert server.started
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
