"""Compiles the kernels: every source on its own, several at a time, then one library of all."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kernels.cpu.library import BUILT, SOURCES, library_path
from kernels.cpu.target import Target

_TORCH = Path(torch.__file__).parent
_OPTIONS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-w",  # of torch's headers; ours are clean with -Wall -Wextra
)


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message says why."""


def build(target: Target) -> Path:
    """Compile the kernels for `target` and return the library, which replaces any older one.

    Raises:
        BuildError: there is no compiler, it failed, or the library does not load.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildError("no C++ compiler; on Debian or Ubuntu: apt-get install g++")
    path = library_path(target)
    try:
        BUILT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as scratch:
            linked = Path(scratch) / path.name
            _link(compiler, _compile(compiler, target, Path(scratch)), linked)
            _remove_older(target)
            linked.replace(path)
    except OSError as error:
        raise BuildError(str(error)) from error
    return path


def _compile(compiler: str, target: Target, scratch: Path) -> list[Path]:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = f"-isystem{_TORCH / 'include'}"

    def compile_one(source: Path) -> Path:
        out = scratch / f"{source.stem}.o"
        _run([compiler, *_OPTIONS, *target.options, abi, includes, "-c", source, "-o", out])
        return out

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))


def _link(compiler: str, objects: list[Path], out: Path) -> None:
    # OpenMP is not linked: the symbols come from the one that torch brings along, and so its
    # threads are ours.
    folder = f"-L{_TORCH / 'lib'}"
    _run([compiler, "-shared", *objects, folder, "-lc10", "-ltorch_cpu", "-o", out])
    try:
        torch.ops.load_library(out)
    except OSError as error:
        raise BuildError(f"what was built does not load: {error}") from error


def _remove_older(target: Target) -> None:
    for other in BUILT.glob(f"trident_cpu-*-{target.name}-*.so"):
        other.unlink()


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{command[0]} failed:\n{done.stderr[-2000:]}")
