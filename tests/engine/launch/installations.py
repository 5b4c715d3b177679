"""Trees in the form of tritonserver's releases, for the tests of the launcher."""

from pathlib import Path

from engine.launch.installation import STUB, Installation

OTHER_VERSION = "3.8"


def touch(path: Path, content: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def make_release(root: Path, version: str | None) -> Path:
    """Make a tree as in NGC's container; return the binary."""
    touch(root / "backends" / "python" / "libtriton_python.so")
    if version is not None:
        content = b"\x7fELF..libpython" + version.encode() + b".so.1.0\0.."
        touch(root / "backends" / "python" / STUB, content)
    return touch(root / "bin" / "tritonserver")


def make_wheel(packages: Path, versions: tuple[str, ...]) -> Path:
    root = packages / "pytriton" / "tritonserver"
    touch(root / "bin" / "tritonserver")
    touch(root / "backends" / "python" / "libtriton_python.so")
    touch(root / "backends" / "python" / "__pycache__" / "a.pyc")
    for version in versions:
        touch(root / "python_backend_stubs" / version / STUB).chmod(0o644)
    return packages


def installation_of(installation: Installation | None) -> Installation:
    assert installation is not None
    return installation
