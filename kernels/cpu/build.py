"""Compiles the C++ sources, several in parallel, and links them into one library."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kernels.cpu.library import BUILT, SOURCES, library_path
from kernels.cpu.target import Target, targets

_TORCH = Path(torch.__file__).parent


class BuildError(RuntimeError):
    """The kernels cannot be built here, for the reason in the message."""


def build(target: Target) -> Path:
    """Compile the kernels for `target` and return the library, which replaces any older one.

    The compiler is $CXX, or g++. The library is test-loaded if this machine can run it.

    Raises:
        BuildError: there is no compiler, it failed, or the library does not load.
    """
    try:
        compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    except ValueError as error:
        raise BuildError(f"CXX: {error}") from None
    if shutil.which(compiler[0]) is None:
        raise BuildError(
            f"the compiler {compiler[0]} was not found; on Debian or Ubuntu: apt-get install g++"
        )
    path = library_path(target)
    try:
        BUILT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as scratch:
            linked = Path(scratch) / path.name
            _link(compiler, _compile(compiler, target, Path(scratch)), linked)
            if target in targets():
                _try(linked)
            linked.replace(path)
            _remove_others(path, target)
    except OSError as error:
        raise BuildError(str(error)) from error
    return path


def _compile(compiler: list[str], target: Target, scratch: Path) -> list[Path]:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = f"-isystem{_TORCH / 'include'}"

    def compile_one(source: Path) -> Path:
        out = scratch / f"{source.stem}.o"
        _run([*compiler, *target.options, abi, includes, "-c", source, "-o", out])
        return out

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))


def _link(compiler: list[str], objects: list[Path], out: Path) -> None:
    # OpenMP is not linked: its symbols resolve to the OpenMP runtime bundled with torch, so that
    # the kernels use torch's threads.
    folder = f"-L{_TORCH / 'lib'}"
    _run([*compiler, "-shared", *objects, folder, "-lc10", "-ltorch_cpu", "-o", out])


def _try(library: Path) -> None:
    """Load the library in a separate process, since a process can load only one."""
    _run([sys.executable, "-P", "-c", f"import torch; torch.ops.load_library({str(library)!r})"])


def _remove_others(path: Path, target: Target) -> None:
    start = path.name[: path.name.index(f"-{target.name}-")]
    for other in BUILT.glob(f"{start}-{target.name}-*.so"):
        if other != path:
            other.unlink(missing_ok=True)  # another process may build as well


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{command[0]} failed:\n{done.stderr[-2000:]}")
