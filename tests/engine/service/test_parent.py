"""A stage ends with its server, and takes along what else the server leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from tests.waiting import eventually

WATCHING = """
import time
from engine.service.parent import end_with_parent
end_with_parent()
print("watching", flush=True)
time.sleep(60)
"""
STUCK = "import time; print('stuck', flush=True); time.sleep(60)"

# Starts one process per script, with the command line of a stub, and then waits.
SERVER = """
import os, subprocess, sys, time
for script, region in zip(sys.argv[1::2], sys.argv[2::2]):
    line = ["/x/triton_python_backend_stub", script, region, "1", "1", str(os.getpid())]
    stub = subprocess.Popen(line, executable=sys.executable, stdout=subprocess.PIPE)
    stub.stdout.readline()
    print(stub.pid, flush=True)
time.sleep(60)
"""


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def regions() -> list[Path]:
    return [Path("/dev/shm") / f"trident-test-{uuid4()}" for _ in range(3)]


def test_all_stubs_of_a_killed_server_end_and_their_regions_go(
    tmp_path: Path, regions: list[Path]
) -> None:
    arguments = []
    for code, region in zip((WATCHING, STUCK), regions, strict=False):
        script = tmp_path / f"{region.name}.py"
        script.write_text(code)
        arguments += [str(script), region.name]
    for region in regions:
        region.touch()
    command = [sys.executable, "-c", SERVER, *arguments]
    # Under another name, Python does not know its virtual environment.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert server.stdout is not None
    stubs = []
    try:
        with server.stdout:
            stubs = [psutil.Process(int(server.stdout.readline())) for _ in range(2)]
            stubs[1].send_signal(signal.SIGSTOP)
            time.sleep(1.2)
            assert not any(map(is_gone, stubs))
            server.kill()
        assert eventually(lambda: all(map(is_gone, stubs)), 10)
        assert [region.exists() for region in regions] == [False, False, True]
    finally:
        server.kill()
        server.wait()
        for stub in stubs:
            if not is_gone(stub):
                stub.kill()
        for region in regions:
            region.unlink(missing_ok=True)
