"""Watchdog: kills an engine process that hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from engine.config.engine_config import EngineConfig
from engine.service.stub.engine_process import EngineProcess

log = logging.getLogger("trident.watchdog")

_TICK_S = 0.5
_LOADING_TIMEOUT_S = 120.0  # importing torch from a cold disk keeps every thread waiting


class Watchdog:
    """Kills the process when its heartbeats stop, or when one iteration of its loop takes too long.

    An iteration is all between two waits for messages: handling messages, a step, statistics.
    Silence is counted in ticks of this thread, so that a stub that was itself stopped, or starved
    of processor time, does not kill the process.
    """

    def __init__(
        self, config: EngineConfig, current_process: Callable[[], EngineProcess | None]
    ) -> None:
        """Watch whatever process `current_process` returns."""
        self._heartbeat_timeout_s = config.heartbeat_timeout_s
        self._step_timeout_s = config.step_timeout_s
        self._current_process = current_process
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _run(self) -> None:
        last, silent_s = (0, 0), 0.0
        while not self._stopped.wait(_TICK_S):
            process = self._current_process()
            if process is None or process.is_hung:
                continue
            now = (process.pid, process.num_heartbeats)
            silent_s = silent_s + _TICK_S if now == last else 0.0
            last = now
            if why := self._complaint(process, silent_s):
                log.error("engine process %d %s: killing it", process.pid, why)
                process.kill(why)

    def _complaint(self, process: EngineProcess, silent_s: float) -> str:
        timeout_s = self._heartbeat_timeout_s if process.is_ready else _LOADING_TIMEOUT_S
        if silent_s > timeout_s:
            return f"hung: it gave no sign of life for {silent_s:g} s"
        if process.iteration_s > self._step_timeout_s:
            return f"hung in a step of {process.iteration_s:.0f} s"
        return ""
