"""`trident demo` in a terminal, on the real server."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

COMMAND = [sys.executable, "-c", "from client.cli import main; main()", "demo"]

# Makes standard input the controlling terminal, so that Ctrl-C becomes SIGINT; in a process of its
# own, because forking this one could hang: other tests have threads of gRPC in it.
IN_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


def run_in_terminal(interrupt_after: bytes | None, folder: Path) -> tuple[int, str]:
    """Run the demo in a pseudo-terminal; press Ctrl-C when the text has appeared.

    `folder` is its temporary directory.
    """
    terminal, slave = pty.openpty()
    environment = {
        **os.environ,
        "COLUMNS": "120",
        "LINES": "40",
        "TERM": "xterm-256color",
        "TMPDIR": str(folder),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *COMMAND],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # how Linux reports that the other end is closed
            break
        shown += data
        if interrupt_after is not None and interrupt_after in shown:
            time.sleep(0.1)
            os.write(terminal, b"\x03")
            interrupt_after = None
    os.close(terminal)
    return process.wait(), shown.decode(errors="replace")


@pytest.mark.parametrize(
    ("interrupt_after", "status"),
    [(None, 0), (b"Starting", 130), pytest.param(b"over gRPC", 130, marks=pytest.mark.large)],
)
def test_it_ends_cleanly(interrupt_after: bytes | None, status: int, tmp_path: Path) -> None:
    found, shown = run_in_terminal(interrupt_after, tmp_path)
    assert "Traceback" not in shown
    assert found == status
    if status == 0:
        assert "all at once" in shown
        assert "一、二、三" in shown
    assert not list(tmp_path.glob("trident-*"))
