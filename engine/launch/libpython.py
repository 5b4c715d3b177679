"""Finds the shared library of the running Python, which the Python-backend stub links against."""

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from engine.launch.errors import ServerStartError


def library_name() -> str:
    """Return the soname that the stub of this Python version asks for."""
    return f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"


def find_libpython(directories: Iterable[Path] | None = None) -> Path:
    """Return the path of the running version's libpython, the interpreter's own if it has one.

    Args:
        directories: where to look, in order; by default where interpreters keep it.

    Raises:
        ServerStartError: there is none; the hint names the ways to get it.
    """
    name = library_name()
    for directory in _directories() if directories is None else directories:
        if (directory / name).is_file():
            return directory / name
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise ServerStartError(
        f"{name} is missing: Triton's Python backend needs the shared library of Python {version}",
        f"on Debian or Ubuntu: sudo apt-get install libpython{version}; elsewhere use a Python "
        f"that brings it: uv venv --managed-python --python {version}, or conda create "
        f"python={version}",
    )


def _directories() -> Iterable[Path]:
    # The interpreter's own first: uv's interpreters carry a LIBDIR of the machine that built them,
    # so the prefix is looked at as well.
    libdir = sysconfig.get_config_var("LIBDIR")
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if libdir:
        yield Path(libdir)
        if multiarch:
            yield Path(libdir) / multiarch
    yield Path(sys.base_prefix) / "lib"
    yield from _linker_directories()


def _linker_directories() -> Iterable[Path]:
    """Yield the directories where the dynamic linker's cache has the library."""
    for command in ("ldconfig", "/sbin/ldconfig"):
        try:
            listing = subprocess.run(
                [command, "-p"], capture_output=True, text=True, check=True
            ).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        pattern = rf"^\s*{re.escape(library_name())}\s.*=>\s*(.+)$"
        yield from (Path(found).parent for found in re.findall(pattern, listing, re.MULTILINE))
        return
