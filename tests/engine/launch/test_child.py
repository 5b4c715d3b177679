"""What the launcher starts ends with the launcher, even if it does not want to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine.launch import child
from tests.waiting import eventually

PATIENCE_S = 0.2

# Starts a server by child.py, and tells its process id.
LAUNCHER = f"""
import subprocess, sys, time
from engine.launch.child import tied
server = subprocess.Popen(tied(sys.argv[1:], {PATIENCE_S}), start_new_session=True)
print(server.pid, flush=True)
if server.wait() is not None:
    time.sleep(60)
"""
# Does not end when it is told to, and neither does the process that it starts.
SERVER = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
orphan = subprocess.Popen(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"])
time.sleep(60)
"""


class Family:
    """A launcher, its server, and all that these have started."""

    def __init__(self, folder: Path) -> None:
        out = folder / "out"
        with out.open("wb") as file:
            launcher = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", SERVER]
            self.launcher = subprocess.Popen(launcher, stdout=file)
        assert eventually(lambda: "ready" in out.read_text())
        self.server = psutil.Process(int(out.read_text().split()[0]))
        self.members = [self.server, *self.server.children(recursive=True)]

    @property
    def alive(self) -> list[psutil.Process]:
        return [each for each in self.members if _is_alive(each)]

    @property
    def watcher(self) -> psutil.Process:
        (found,) = (each for each in self.members if child.__file__ in each.cmdline())
        return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("is_stopped", [False, True])
def test_all_processes_of_a_server_end_when_its_launcher_is_killed(
    tmp_path: Path, is_stopped: bool
) -> None:
    family = Family(tmp_path)
    try:
        assert family.watcher in family.alive
        if is_stopped:
            family.server.suspend()
        family.launcher.kill()
        assert eventually(lambda: not family.alive, 30)
    finally:
        for each in family.alive:
            each.kill()
        family.launcher.wait()


def test_what_a_dead_server_leaves_ends_and_so_does_the_watcher(tmp_path: Path) -> None:
    family = Family(tmp_path)
    try:
        family.server.kill()
        assert eventually(lambda: not family.alive, 30)
        assert family.launcher.poll() is None
    finally:
        family.launcher.kill()
        family.launcher.wait()


def test_a_launcher_that_has_died_before_gets_no_server(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-I", child.__file__, str(os.getpid() + 1), "1", "0", "touch"]
    assert subprocess.run([*command, str(out)], check=False).returncode == 1
    assert not out.exists()
