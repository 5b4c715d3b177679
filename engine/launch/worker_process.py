"""WorkerProcess: a process that makes calls; `python -m engine.launch.worker_process FD` is one."""

from __future__ import annotations

import atexit
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

_EXIT_S = 10.0  # that a process needs at most to end by itself


class WorkerProcess:
    """A process that makes one call after the other, until `end`.

    Args:
        out: where it prints; by default to stderr.

    Attributes:
        process: itself.
    """

    def __init__(
        self,
        out: int | IO[str] = 2,
        python: str = sys.executable,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._pipe, its = Pipe()
        with its:
            self.process = subprocess.Popen(
                [python, "-P", "-m", "engine.launch.worker_process", str(its.fileno())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[its.fileno()],
                start_new_session=True,  # Ctrl-C goes to this process, which ends the other
            )
        atexit.register(self.process.kill)

    def start(self, work: Callable[..., object], *arguments: object) -> None:
        """Begin a call; one at a time."""
        with suppress(OSError):  # it has died, which the missing result shows
            self._pipe.send((work, arguments))

    def result(self, timeout_s: float | None = None) -> Any:
        """Return what the call has returned.

        Raises:
            ChildProcessError: its process has died, or was ended for it has taken so long.
        """
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_EXIT_S)  # with a status of its own
        raise ChildProcessError(f"its process ended with {self.end()}")

    def end(self) -> int:
        """End it: it has nothing to save. Returns its exit status."""
        self._pipe.close()
        self.process.kill()
        return self.process.wait()


def main() -> None:
    """Make the calls that come, until the other end is closed."""
    parent = Connection(int(sys.argv[1]))
    while True:
        try:
            work, arguments = parent.recv()
        except EOFError:
            return
        parent.send(work(*arguments))


if __name__ == "__main__":
    main()
