"""Runs a gateway until it is told to stop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import socket
import sys
import time
from pathlib import Path

import uvicorn

from client.errors import ConfigurationError
from client.gateway.app import create_app
from client.gateway.processes.workers import Workers
from client.gateway.routing.pool import ServerPool
from client.gateway.security.http_protocol import BoundedHttpProtocol
from client.gateway.settings import DEFAULT_PORT, GatewaySettings

_POLL_S = 0.1
_LAST_EVENTS_S = 1.0  # that clients have to read how their answers ended
BACKLOG = 2048  # connections that wait to be accepted
# Options of glibc's mallopt.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_MMAP_BYTES = 2**17  # what glibc begins with


class Server(uvicorn.Server):
    """Ends within a bounded time, or at once at a second SIGINT, whatever is connected.

    Answers in flight have some seconds to be finished. Those that are not end with an error, in a
    stream as its last event. Then all connections are closed, also those of clients that do not
    read.

    Without descriptors asyncio tries to accept as many connections as may wait, each time with a
    traceback, and each failure tries again: soon it does nothing else. So it is told of one.

    Args:
        config: uvicorn's.
        pool: the servers that the answers come from.
        timeout_s: seconds to finish answers.
    """

    def __init__(self, config: uvicorn.Config, pool: ServerPool, timeout_s: float) -> None:
        super().__init__(config)
        self._pool = pool
        self._timeout_s = timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; more connections may wait than are accepted at once."""
        await super().startup(sockets)
        if self.should_exit:  # the application has not started, and nothing listens
            return
        for server in self.servers:
            for listener in server.sockets:
                with socket.socket(fileno=os.dup(listener.fileno())) as same:
                    same.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the answers in flight, or cut them off."""
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        await self._wait(self._timeout_s)
        if not self.force_exit:
            await self._pool.close()
            await self._wait(_LAST_EVENTS_S)
        # uvicorn waits for nothing now but for its sockets, which wait for their connections from
        # Python 3.12.1 on.
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _wait(self, seconds: float) -> None:
        """Return after `seconds`, or at a second SIGINT."""
        deadline = time.monotonic() + seconds
        while not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)


def serve(settings: GatewaySettings, host: str, port: int, workers: int = 1) -> None:
    """Serve until SIGTERM or SIGINT; answers in flight have some time, unless SIGINT comes again.

    Args:
        settings: of the gateway.
        host, port: where it listens.
        workers: processes that share the work; 1 is this one alone.

    Raises:
        ConfigurationError: a setting is wrong.
        SystemExit: it cannot listen there.
    """
    configure_logging()
    server = make_server(settings, host, port)
    if workers == 1:
        run(server)
    else:
        Workers(settings, server.config.bind_socket(), workers).run()


def run(server: Server, sockets: list[socket.socket] | None = None) -> None:
    """Run a server in this process, which is for nothing else, until it is told to end."""
    # What the start has made stays: 90,000 objects, in which looking for garbage took 60 ms, for
    # which all streams stood still.
    gc.freeze()
    give_back_large_bodies()
    # Each connection takes a descriptor. The usual limit of 1024 is for programs that use `select`.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server.run(sockets)


def give_back_large_bodies() -> None:
    """Have this process return the memory of large bodies to the system when they are freed.

    glibc raises the size from which memory is its own mapping, up to 32 MiB, whenever such a one is
    freed, and has heaps for each thread: what a large body took stays between small objects. After
    a minute of bodies of megabytes a gateway without requests kept 400 MiB, and more each minute;
    with these two bounds 110 to 160 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # not in other C libraries
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_ARENA_MAX, 2)


def configure_logging() -> None:
    """Write the lines of requests to standard error."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("trident").setLevel(logging.INFO)


def make_server(
    settings: GatewaySettings,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    shared: Path | None = None,
) -> Server:
    """Return a server that has not been started.

    Args:
        settings: of the gateway.
        host, port: where it listens, if `run` gets no socket.
        shared: as in `Gateway`.

    Raises:
        ConfigurationError: a setting is wrong.
    """
    app = create_app(settings, shared)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=BoundedHttpProtocol,
        ws="none",
        backlog=1,  # see `Server`
        access_log=False,  # ours is written without query strings
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # nobody here asks where a request comes from
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    try:
        config.load()
    except OSError as error:  # also what OpenSSL says
        raise ConfigurationError(f"{error}", param="ssl_certfile, ssl_keyfile") from None
    return Server(config, app.state.gateway.pool, settings.shutdown_timeout_s)
