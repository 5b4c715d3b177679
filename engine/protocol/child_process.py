"""ChildProcess: a process that this one has started, and how it ended."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

_EXIT_TIMEOUT_S = 2.0

# Signals by which a program ends through its own fault.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


@dataclass(frozen=True)
class Death:
    """How a process ended.

    Attributes:
        reason: text that follows the name of the process.
        is_own_fault: it crashed, rather than was killed from outside.
    """

    reason: str
    is_own_fault: bool


class ChildProcess:
    """A child, from its start on.

    Attributes:
        pid: its process id.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Take over `process`, which has just been started."""
        self._process = process
        self.pid = process.pid
        self._num_oom_kills = _num_oom_kills()

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped from outside."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def kill(self) -> None:
        """Have it end at once."""
        self._process.kill()

    def end(self) -> Death | None:
        """Wait for its end, and kill it if that takes long; None: it cannot be killed."""
        try:
            return self._death(self._process.wait(_EXIT_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
        try:
            return self._death(self._process.wait(_EXIT_TIMEOUT_S))
        except subprocess.TimeoutExpired:  # inside the kernel, as a lost GPU makes it
            return None

    def _death(self, status: int) -> Death:
        if status >= 0:
            return Death(f"ended with status {status}; its log says why", is_own_fault=status != 0)
        name = signal.Signals(-status).name
        if status == -signal.SIGKILL and _num_oom_kills() > self._num_oom_kills:
            return Death(f"was killed by {name} because memory ran out", is_own_fault=True)
        return Death(f"was killed by {name}", is_own_fault=-status in _CRASHES)


def _num_oom_kills() -> int:
    """Return how many processes this machine's kernel has killed to get their memory."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii").split()
        return int(counters[counters.index("oom_kill") + 1])
    except (OSError, ValueError):  # an old kernel, or hidden by a sandbox
        return 0
