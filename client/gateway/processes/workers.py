"""Workers: several processes that serve one port."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client import multiprocess

from client.gateway.settings import SETTINGS, GatewaySettings

log = logging.getLogger("trident.gateway")

_END_S = 2.0  # that a worker needs to end, beside the time for its answers
_PAUSE_S = 1.0  # from the start of a worker to that of the one in its place, at least


class Workers:
    """Keeps a number of workers running until this process is told to end.

    Each has a socket of its own there. (Unlike those of uvicorn's supervisor they end if this one
    is killed, and the port is closed as soon as they are told to end.)
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
