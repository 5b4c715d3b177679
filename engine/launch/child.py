"""Run as a script by the launcher: becomes tritonserver, the gateway or another server.

    python -I child.py LAUNCHER_PID PATIENCE_S STACK_BYTES COMMAND...

Between fork and exec of a process with threads next to nothing is safe to do, so this small
program does what must be done inside the server's process: it ties its life to the launcher's and
raises its stack limit, unless STACK_BYTES is 0.

The kernel sends the server SIGTERM when the launcher dies, which a server that hangs ignores. So
this program first forks a watcher, which kills the server's process group if that is still there
PATIENCE_S seconds after the launcher, or the server itself, has gone.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_ORPHANS_S = 2.0  # that processes have to end by themselves after the server


def tied(command: Sequence[str], patience_s: float, stack_bytes: int = 0) -> list[str]:
    """Return a command line for a child of this process that becomes `command`, tied to it.

    Args:
        command: a program and its arguments; it must be started as the leader of a process group.
        patience_s: seconds that it has to end by itself.
        stack_bytes: of the stack of each of its threads; 0 leaves the limit as it is.
    """
    arguments = (str(os.getpid()), str(patience_s), str(stack_bytes))
    return [sys.executable, "-I", __file__, *arguments, *command]


def main(launcher: int, patience_s: float, stack_bytes: int, command: list[str]) -> None:
    """Replace this process with `command`; it gets SIGTERM when the launcher dies."""
    server = os.getpid()
    if os.fork() == 0:
        _watch(server, launcher, patience_s)
        os._exit(0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it died before the line above
        sys.exit(1)
    if stack_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        wanted = stack_bytes if hard == resource.RLIM_INFINITY else min(stack_bytes, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    os.execvp(command[0], command)


def _watch(server: int, launcher: int, patience_s: float) -> None:
    """Return when the process group of `server` has ended, by itself or by force."""
    os.setsid()  # out of that group; what ends the server is not for this process
    while os.getppid() == server and _parent_of(server) == launcher:
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        _wait_for_group(server, patience_s)
        if os.getppid() == server:
            os.kill(server, signal.SIGKILL)
        # What it started ends by itself then: stages remove their shared memory.
        _wait_for_group(server, _ORPHANS_S)
        os.killpg(server, signal.SIGKILL)


def _wait_for_group(group: int, seconds: float) -> None:
    """Return after `seconds`; raises ProcessLookupError when no process of the group is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        os.killpg(group, 0)
        time.sleep(_POLL_S)


def _parent_of(process: int) -> int:
    """Return the process id of the parent; 0 if `process` has gone."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
