"""StageWatch: notices that a model stage has died, which tritonserver does not."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from engine.launch.installation import STUB

# A server that is stopped lets its stages go first, and then waits 5 s at most (its
# --exit-timeout-secs) for requests in flight.
_GRACE_S = 6.0
_SIGNAL_MASK = 0x7F  # of a status as `waitpid` has it


class StageWatch:
    """The stage processes of a running server.

    Without a stage, release 24.10 keeps running and reports itself healthy, while requests in
    flight hang for ever and new ones fail. Only a restart of the server helps.
    """

    def __init__(self, server_pid: int) -> None:
        """Remember the stages of the server, which is ready."""
        self._stages = dict(_stages_of(server_pid))
        self._dead_since: float | None = None

    def lost(self) -> str:
        """Return the model whose stage was killed, or ended long before the server; "" if none."""
        dead = [stage for stage in self._stages if not _is_alive(stage)]
        if not dead:
            return ""
        for stage in dead:
            if _was_killed(stage.pid):
                return self._stages[stage]
        if self._dead_since is None:
            self._dead_since = time.monotonic()
        is_over = time.monotonic() - self._dead_since > _GRACE_S
        return self._stages[dead[0]] if is_over else ""


def _stages_of(server_pid: int) -> Iterator[tuple[psutil.Process, str]]:
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(server_pid).children():
            if child.name().startswith(STUB[:15]):  # as much of it as Linux keeps
                yield child, _model_of(child)


def _model_of(stage: psutil.Process) -> str:
    """Return the name of the model that a stage runs: it is called with MODEL/VERSION/model.py."""
    try:
        return Path(stage.cmdline()[1]).parts[-3]
    except (psutil.Error, IndexError):
        return "unknown"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _was_killed(zombie: int) -> bool:
    """Whether a process that tritonserver has not waited for was ended by a signal.

    One that tritonserver stopped itself was not. The status is the last field; 0 if it is hidden.
    """
    try:
        fields = Path(f"/proc/{zombie}/stat").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return bool(int(fields[-1]) & _SIGNAL_MASK)
