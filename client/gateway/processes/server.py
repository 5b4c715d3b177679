"""Runs a gateway in one or more worker processes until it is stopped."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import uvicorn
from prometheus_client import multiprocess

from client.errors import ConfigurationError
from client.gateway.app import create_app
from client.gateway.routing.pool import ServerPool
from client.gateway.security.http_protocol import BoundedHttpProtocol
from client.gateway.settings import DEFAULT_PORT, SETTINGS, GatewaySettings

_POLL_S = 0.1
_LAST_EVENTS_S = 1.0  # that clients have to read how their answers ended
BACKLOG = 2048  # connections that wait to be accepted
# Options of glibc's mallopt.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_MMAP_BYTES = 2**17  # what glibc begins with

log = logging.getLogger("trident.gateway")

_END_S = 2.0  # that a worker needs to end, beside the time for its answers
_PAUSE_S = 1.0  # from the start of a worker to that of the one in its place, at least


class Workers:
    """Keeps a number of workers running until this process is stopped.

    Each has a socket of its own there. (Unlike those of uvicorn's supervisor they end if this one
    is killed, and the port is closed as soon as they are stopped.)
    """

    def __init__(self, settings: GatewaySettings, bound: socket.socket, count: int) -> None:
        """Make a supervisor.

        Args:
            settings: of the gateway.
            bound: to the address, which nobody else had. It is closed.
            count: how many workers.
        """
        share = settings.max_buffered_bytes // count
        self._settings = SETTINGS.dump_json(replace(settings, max_buffered_bytes=share))
        self._patience_s = settings.shutdown_timeout_s + _END_S
        self._address = bound.getsockname()
        self._family = bound.family
        bound.close()
        self._count = count
        self._running = set[Process]()
        self._is_ending = False

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, of which this process then dies.

        Answers in flight are finished, unless SIGINT comes again.
        """
        with (
            TemporaryDirectory(prefix="trident_gateway_", ignore_cleanup_errors=True) as folder,
            socket.socket(self._family) as reserved,  # while no worker listens
        ):
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(self._address)
            number = asyncio.run(self._supervise(Path(folder)))
        signal.raise_signal(number)

    async def _supervise(self, folder: Path) -> signal.Signals:
        """Return the signal that ended it."""
        signals = asyncio.Queue[signal.Signals]()
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, signals.put_nowait, each)
        keeping = asyncio.gather(*(self._keep(folder) for _ in range(self._count)))
        first = await signals.get()
        self._is_ending = True
        self._send(signal.SIGTERM)
        passing_on = asyncio.create_task(self._pass_on(signals))
        await asyncio.wait([keeping], timeout=self._patience_s)
        self._send(signal.SIGKILL)  # to those that hang
        await keeping
        passing_on.cancel()
        return first

    async def _pass_on(self, signals: asyncio.Queue[signal.Signals]) -> None:
        while True:
            self._send(await signals.get())

    def _send(self, number: signal.Signals) -> None:
        for worker in self._running:
            with suppress(ProcessLookupError):  # it has ended, and was not awaited yet
                worker.send_signal(number)

    async def _keep(self, folder: Path) -> None:
        """Keep one worker running."""
        while not self._is_ending:
            started = time.monotonic()
            try:
                worker = await self._start(folder)
            except OSError as error:  # no memory, or no more processes
                log.error("a worker cannot be started: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            status = await worker.wait()
            self._running.discard(worker)
            multiprocess.mark_process_dead(worker.pid, str(folder))  # type: ignore[no-untyped-call]
            if not self._is_ending:
                log.error("worker %d has died (exit status %d)", worker.pid, status)
                await asyncio.sleep(started + _PAUSE_S - time.monotonic())

    async def _start(self, folder: Path) -> Process:
        host, port = self._address[:2]
        worker = await asyncio.create_subprocess_exec(
            # -P: no file of the working directory in place of a module.
            *(sys.executable, "-P", "-m", "client.gateway.processes.worker"),
            *(host, str(port), str(folder)),
            stdin=PIPE,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        )
        self._running.add(worker)
        assert worker.stdin is not None
        worker.stdin.write(self._settings + b"\n")  # and it stays open: its end is ours
        if self._is_ending:
            worker.terminate()
        return worker


class Server(uvicorn.Server):
    """Ends within a bounded time, or at once at a second SIGINT, whatever is connected.

    Answers in flight have some seconds to be finished. Those that are not end with an error, in a
    stream as its last event. Then all connections are closed, also those of clients that do not
    read.

    Without descriptors asyncio tries to accept as many connections as may wait, each time with a
    traceback, and each failure tries again: soon it does nothing else. So its backlog is one.

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
    """Run a server in this process, which is for nothing else, until it is stopped."""
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
    except OSError as error:  # also OpenSSL's errors
        raise ConfigurationError(f"{error}", param="ssl_certfile, ssl_keyfile") from None
    return Server(config, app.state.gateway.pool, settings.shutdown_timeout_s)
