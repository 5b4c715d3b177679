"""Finds a tritonserver on this machine that can run models of the running Python version."""

import importlib.util
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.launch.errors import ServerStartError
from engine.launch.requirements import machine_problem

STUB = "triton_python_backend_stub"
NGC_ROOT = Path("/opt/tritonserver")
# NVIDIA's package on PyPI, in the version of the extra `server`.
WHEEL = "nvidia-pytriton==0.7.0"


@dataclass(frozen=True)
class Installation:
    """A tritonserver with what belongs to it.

    Attributes:
        binary: the executable.
        python_backend: the folder with `libtriton_python.so`.
        stubs: Python version ("3.11") -> the stub executable of that version.
        libraries: folders that LD_LIBRARY_PATH must name.
    """

    binary: Path
    python_backend: Path
    stubs: dict[str, Path]
    libraries: tuple[Path, ...] = ()

    @property
    def backend_directory(self) -> Path | None:
        """The folder for `--backend-directory`, if its own stub fits this Python."""
        own = self.stubs.get(python_version())
        return self.python_backend.parent if own == self.python_backend / STUB else None


def model_repository() -> Path:
    """Return the model repository that comes with Trident, in a checkout as in a wheel."""
    return Path(__file__).parents[2] / "model_repository"


def python_version() -> str:
    """Return the running Python's version as stubs are named by it, for example `3.11`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def find_tritonserver(candidates: Iterable[Installation] | None = None) -> Installation:
    """Return the first installation that has a stub for the running Python.

    Args:
        candidates: the installations to choose from; by default NGC's `/opt/tritonserver`, then
            the one on PATH, then the PyPI wheel nvidia-pytriton.

    Raises:
        ServerStartError: there is no tritonserver, or none fits this Python version.
    """
    found = list(_installations() if candidates is None else candidates)
    if not found:
        raise ServerStartError(
            "tritonserver was not found: neither in /opt/tritonserver, nor on PATH, nor as the "
            "Python package nvidia-pytriton",
            _way_to_get_it(),
        )
    for installation in found:
        if python_version() in installation.stubs:
            return installation
    offered = sorted({v for each in found for v in each.stubs}, key=lambda v: int(v.split(".")[1]))
    raise ServerStartError(
        f"{found[0].binary} cannot run models of Python {python_version()}: its Python backend "
        f"has stubs for {', '.join(offered) or 'no version'} only",
        f"run trident with one of those versions, or install a tritonserver that has the stub: "
        f"{_way_to_get_it()}",
    )


def _way_to_get_it() -> str:
    if problem := machine_problem():
        return f"{problem}; use NVIDIA's container: docker/README.md"
    return f"in a checkout: make install; elsewhere: {sys.executable} -m pip install {WHEEL}"


def _installations() -> Iterable[Installation]:
    binaries = [NGC_ROOT / "bin" / "tritonserver"]
    if on_path := shutil.which("tritonserver"):
        binaries.append(Path(on_path).resolve())
    for binary in binaries:
        if installation := from_release(binary):
            yield installation
    # find_spec does not import the package, which would start threads and more.
    spec = importlib.util.find_spec("pytriton")
    if (
        spec is not None
        and spec.origin is not None
        and (installation := from_wheel(Path(spec.origin).parents[1]))
    ):
        yield installation


def from_release(binary: Path) -> Installation | None:
    """Return the installation of `<root>/bin/tritonserver` as NVIDIA's releases lay it out."""
    python_backend = binary.parents[1] / "backends" / "python"
    if not (binary.is_file() and (python_backend / "libtriton_python.so").is_file()):
        return None
    stub = python_backend / STUB
    version = _linked_version(stub)
    return Installation(
        binary,
        python_backend,
        {version: stub} if version else {},
        tuple(p for p in [binary.parents[1] / "lib"] if p.is_dir()),
    )


def from_wheel(packages: Path) -> Installation | None:
    """Return the installation that the wheel nvidia-pytriton put into `packages`."""
    root = packages / "pytriton" / "tritonserver"
    if not (root / "bin" / "tritonserver").is_file():
        return None
    stubs = {stub.parent.name: stub for stub in root.glob(f"python_backend_stubs/*/{STUB}")}
    return Installation(
        root / "bin" / "tritonserver",
        root / "backends" / "python",
        stubs,
        (packages / "nvidia_pytriton.libs",),
    )


def _linked_version(stub: Path) -> str | None:
    """Read from a stub which libpython it links against; None if there is no such stub."""
    try:
        content = stub.read_bytes()
    except OSError:
        return None
    found = re.search(rb"libpython(3\.\d+)\.so", content)
    return found[1].decode() if found else None
