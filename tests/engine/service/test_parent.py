"""A stage ends with its server, and takes its shared memory along."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine.service.parent import remove_region

CHILD = """
import time
from engine.service.parent import end_with_parent
end_with_parent()
print("watching", flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_ends_when_its_parent_is_killed_and_not_before() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(1.2)
        assert child.is_running()
        parent.kill()
        parent.wait()
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_region_of_the_command_line_is_removed_and_no_other(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        (tmp_path / name).touch()
    remove_region(b"stub\0model.py\0mine\x001048576\0", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize(
    "line", [b"", b"stub\0model.py\0", b"a\0b\0../x\0", b"a\0b\0\0", b"a\0b\0."]
)
def test_a_command_line_that_names_no_region_removes_nothing(tmp_path: Path, line: bytes) -> None:
    shared_memory = tmp_path / "shm"
    shared_memory.mkdir()
    (tmp_path / "x").touch()
    remove_region(line, shared_memory)
    assert (tmp_path / "x").exists()
    assert shared_memory.exists()
