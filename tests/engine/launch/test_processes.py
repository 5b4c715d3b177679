"""Ending the processes of a server, and removing what tritonserver leaves."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine.launch import processes
from engine.launch.environment import RUN_ID
from engine.launch.processes import kill_all
from tests.engine.launch.installations import touch
from tests.waiting import eventually


def test_kill_all_finds_a_child_in_a_session_of_its_own() -> None:
    child = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, RUN_ID: "trident-test-run"}, start_new_session=True
    )
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_ID: "another-run"})
    try:
        # Linux shows the environment a moment after the program has been started.
        assert eventually(lambda: RUN_ID in psutil.Process(child.pid).environ())
        kill_all("trident-test-run")
        assert not psutil.pid_exists(child.pid)
        child.wait()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


class TestRemoveEnvironment:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(processes, "_ENVIRONMENTS", tmp_path)
        monkeypatch.setattr(psutil, "process_iter", lambda attributes: [])
        folder = tmp_path / "python_env_abc"
        folder.mkdir()
        return folder

    def test_of_the_killed_server(self, folder: Path) -> None:
        processes.remove_environment(folder.stat().st_ctime - 1)
        assert not folder.exists()

    def test_of_another_time(self, folder: Path) -> None:
        processes.remove_environment(folder.stat().st_ctime + 1)
        processes.remove_environment(folder.stat().st_ctime - 60)
        assert folder.exists()

    def test_in_use(self, folder: Path) -> None:
        touch(folder / "environment.tar")
        processes.remove_environment(folder.stat().st_ctime - 1)
        assert folder.exists()

    def test_maybe_of_another_server(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started = folder.stat().st_ctime - 1
        info = {"name": "tritonserver", "create_time": started + 0.5}
        other = SimpleNamespace(info=info)
        monkeypatch.setattr(psutil, "process_iter", lambda attributes: [other])
        processes.remove_environment(started)
        assert folder.exists()
