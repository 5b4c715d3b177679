"""Run as a script by the launcher: becomes tritonserver.

    python -I child.py LAUNCHER_PID COMMAND...

Between fork and exec of a process with threads next to nothing is safe to do, so this small
program does what must be done inside the server's process: it ties its life to the launcher's and
raises its stack limit.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_STACK_BYTES = 256 << 20  # tritonserver 2.51 puts HTTP bodies on the stack; 8 MB crash at 7.5 MB


def main(launcher: int, command: list[str]) -> None:
    """Replace this process with `command`; it gets SIGTERM when the launcher dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it died before the line above
        sys.exit(1)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
