"""The Python packages that travel to a machine that has only torch, Triton and NumPy.

`packages.txt` pins the wheels by their SHA-256 hashes, for x86-64 Linux and Python 3.11 and 3.12:
all that the engine, its tests and this benchmark import besides torch, Triton and NumPy.
transformers is one of them (11 of 25 MB): it is the reference of the tests, reads tokenizers, and
is measured beside the engine. `engine.bench.pack` downloads the wheels into `WHEELS`, and
`provide` makes them importable where the packages are missing; it needs neither pip nor a network.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[3]
WHEELS = ROOT / ".gpu-wheels"
LOCK = Path(__file__).with_name("packages.txt")

REQUIRED = ("torch", "triton", "numpy")  # never packed: they depend on the GPU's driver
PACKED = (
    "transformers",
    "tokenizers",
    "safetensors",
    "jinja2",
    "pydantic",
    "msgspec",
    "llguidance",
    "psutil",
    "rich",
    "pytest",
    "hypothesis",
)


class PackageError(Exception):
    """Packages are missing or damaged; the message says which, and what to do."""


@contextmanager
def provide() -> Iterator[str]:
    """Make all packages importable inside the block, here and in child processes.

    Yields where they come from. If this Python lacks one, all packed wheels are unpacked and take
    precedence, so that versions are consistent.

    Raises:
        PackageError: packages are missing, or a wheel is not the one that was pinned.
    """
    if absent := [name for name in REQUIRED if find_spec(name) is None]:
        raise PackageError(f"missing Python packages: {', '.join(absent)}")
    missing = [name for name in PACKED if find_spec(name) is None]
    if not missing:
        yield "all packages are installed"
        return
    if not WHEELS.is_dir():
        raise PackageError(
            f"missing Python packages: {', '.join(missing)}. Install them, or run "
            f"`python -m engine.bench.pack` where there is a network and take {WHEELS.name}/ along"
        )
    with tempfile.TemporaryDirectory(prefix="gpu-wheels-") as site:
        num_wheels = unpack(WHEELS, Path(site))
        path = os.environ.get("PYTHONPATH")
        sys.path.insert(0, site)
        os.environ["PYTHONPATH"] = site if not path else f"{site}{os.pathsep}{path}"
        importlib.invalidate_caches()
        try:
            if absent := [name for name in PACKED if find_spec(name) is None]:
                raise PackageError(
                    f"{WHEELS.name}/ lacks wheels of {', '.join(absent)} for this Python: "
                    "run `python -m engine.bench.pack` again"
                )
            yield f"{num_wheels} wheels of {WHEELS.name}/, as {', '.join(missing)} were missing"
        finally:
            sys.path.remove(site)
            if path is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = path


def unpack(wheels: Path, site: Path) -> int:
    """Unpack the wheels in `wheels` that fit this Python into `site`; return how many.

    Raises:
        PackageError: a wheel is not listed in `packages.txt`.
    """
    fitting = sorted(wheel for wheel in wheels.glob("*.whl") if fits(wheel.name))
    known = LOCK.read_text()
    for wheel in fitting:
        if hashlib.sha256(wheel.read_bytes()).hexdigest() not in known:
            raise PackageError(f"{wheel.name}: its hash is not in {LOCK.name}: pack again")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    # Files of a wheel's .data folder belong elsewhere; code is in its purelib and platlib.
    for code in [*site.glob("*.data/purelib"), *site.glob("*.data/platlib")]:
        shutil.copytree(code, site, dirs_exist_ok=True)
    return len(fitting)


def fits(wheel: str, version: tuple[int, int] = sys.version_info[:2]) -> bool:
    """Return whether a wheel, by its file name, is for this version of Python."""
    python, abi = wheel.removesuffix(".whl").split("-")[-3:-1]
    return "py3" in python.split(".") or abi == "abi3" or python == "cp{}{}".format(*version)
