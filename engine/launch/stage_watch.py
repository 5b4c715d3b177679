"""StageWatch: notices that a model stage has died, which tritonserver does not."""

import time

import psutil

from engine.launch.installation import STUB

# A server that is told to end lets its stages go first, and then waits 5 s at most (its
# --exit-timeout-secs) for requests in flight.
_GRACE_S = 6.0


class StageWatch:
    """The stage processes of a running server.

    Without a stage, release 24.10 keeps running and reports itself healthy, while requests in
    flight hang for ever and new ones fail. Only a restart of the server helps.
    """

    def __init__(self, server_pid: int) -> None:
        """Remember the stages of the server, which is ready."""
        self._stages = [
            child
            for child in psutil.Process(server_pid).children()
            if child.name().startswith(STUB[:15])  # as much of it as Linux keeps
        ]
        self._dead_since: float | None = None

    def has_lost_one(self) -> bool:
        """Return whether a stage has been gone for longer than an ending server takes."""
        if all(_is_alive(stage) for stage in self._stages):
            return False
        if self._dead_since is None:
            self._dead_since = time.monotonic()
        return time.monotonic() - self._dead_since > _GRACE_S


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
