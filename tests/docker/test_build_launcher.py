"""docker/build-launcher: what Triton's compiler needs on a GPU is there without a C compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.files import DOCKER

LOAD = "from triton.backends.nvidia.driver import CudaUtils; print(CudaUtils().launch)"


def load(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Load the launcher in a process that finds no compiler, with the stub in place of a driver."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    if not (programs / "file").exists():  # by which the cache's keys tell platforms apart
        (programs / "file").symlink_to(shutil.which("file") or "/nonexistent")
    stub = str(folder / "stub")
    environment = {
        "PATH": str(programs),
        "HOME": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "LD_LIBRARY_PATH": stub,
        "TRITON_LIBCUDA_PATH": stub,
        **environ,
    }
    command = [sys.executable, "-c", LOAD]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not on PATH")
def test_the_launcher_loads_without_a_compiler(tmp_path: Path) -> None:
    script = DOCKER / "build-launcher"
    subprocess.run(
        [script, sys.executable, tmp_path / "cache", tmp_path / "stub"],
        env={**os.environ, "LD_LIBRARY_PATH": ""},
        check=True,
    )
    (built,) = (tmp_path / "cache").glob("*/cuda_utils*.so")
    assert b"libcuda.so.1" in built.read_bytes()  # the driver is loaded with it
    loaded = load(tmp_path)
    assert loaded.stdout.startswith("<built-in function launch>"), loaded.stderr
    without = load(tmp_path, TRITON_CACHE_DIR=str(tmp_path / "empty"))
    assert "Failed to find C compiler" in without.stderr
