"""`trident demo` in a terminal, on the real server."""

import os
import pty
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

COMMAND = [sys.executable, "-c", "from client.cli import main; main()", "demo"]


def run_in_terminal(interrupt_after: bytes | None, folder: Path) -> tuple[int, str]:
    """Run the demo in a pseudo-terminal; press Ctrl-C when the text has appeared.

    `folder` is its temporary directory.
    """
    pid, terminal = pty.fork()
    if pid == 0:  # the child
        os.environ.update(COLUMNS="120", LINES="40", TERM="xterm-256color", TMPDIR=str(folder))
        os.execv(COMMAND[0], COMMAND)
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
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown.decode(errors="replace")


@pytest.mark.parametrize(
    ("interrupt_after", "status"), [(None, 0), (b"over gRPC", 130), (b"Starting", 130)]
)
def test_it_ends_cleanly(interrupt_after: bytes | None, status: int, tmp_path: Path) -> None:
    found, shown = run_in_terminal(interrupt_after, tmp_path)
    assert "Traceback" not in shown
    assert found == status
    if status == 0:
        assert "all at once" in shown
        assert "一、二、三" in shown
    assert not list(tmp_path.glob("trident-*"))
