"""The private directory of one running server, and the removal of everything it left.

Its name is also the prefix of the server's shared-memory regions. A lock on it is held by the
launcher and inherited by every process of the server. A directory whose lock no process holds was
left by a killed launcher; the next start removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from engine.launch.installation import STUB, Installation, python_version
from engine.launch.libpython import find_libpython
from engine.launch.model_configs import ENSEMBLE

_PREFIX = "trident-"
_LOCK = "lock"
_SHARED_MEMORY = Path("/dev/shm")
# Python puts the working directory of a stub first on its path, whatever PYTHONSAFEPATH is, and
# Triton's own modules are imported before any of ours: so a stub starts in an empty directory. Our
# stages then change to tritonserver's (`engine.service.interpreter`), for relative paths.
_START_STUB = """\
#!/bin/sh
cd {empty} && exec {stub} "$@"
"""
# Triton hands the names of the stub and of a model to a shell as they are, and then to a Python
# that takes them for ASCII.
_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
_PLAIN_TEMPORARY = "/tmp"


class RunDirectory:
    """A directory below the system's temporary one, or /tmp, made at construction.

    Attributes:
        path: the directory; it does not change and exists until `remove`.
        lock: file descriptor of the lock, to be inherited by the server.
    """

    def __init__(self) -> None:
        remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_parent()))
        # Locked before it gets the name by which `remove_stale` knows it.
        unnamed = self.path / f"{_LOCK}.new"
        self.lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _LOCK)

    @property
    def shared_memory_prefix(self) -> str:
        """What the names of the server's regions in /dev/shm begin with."""
        return self.path.name + "-"

    def add_libpython(self) -> Path:
        """Return a folder with nothing but the running Python's libpython in it.

        Naming the folder that holds it in LD_LIBRARY_PATH instead would put everything else
        there (a conda environment's libstdc++, for example) before the server's own libraries.

        Raises:
            ServerStartError: libpython is missing.
        """
        library = find_libpython()
        folder = self.path / "lib"
        folder.mkdir()
        (folder / library.name).symlink_to(library)
        return folder

    def add_repository(self, source: Path, served_model_name: str) -> Path:
        """Return a model repository of the models in `source`, its ensemble under another name.

        Not under two names: two ensembles over one engine corrupt the memory of release 24.10.
        """
        repository = self.path / "models"
        repository.mkdir()
        for config in source.glob("*/config.pbtxt"):
            model = config.parent
            name = served_model_name if model.name == ENSEMBLE else model.name
            (repository / name).symlink_to(model)
        return repository

    def add_backends(self, installation: Installation) -> Path:
        """Return a backend directory with the backends of `installation`.

        The stub of its Python backend is the running version's, and starts in an empty directory.
        """
        backends = self.path / "backends"
        ours = backends / "python"
        ours.mkdir(parents=True)
        if installation.backend_directory is not None:  # of a release, which has others too
            _link_content(installation.backend_directory, backends, but="python")
        _link_content(installation.python_backend, ours, but=STUB)
        folder, empty = self.path / "stub", self.path / "empty"
        for made in (folder, empty):
            made.mkdir()
        stub = folder / STUB
        shutil.copyfile(installation.stubs[python_version()], stub)
        script = ours / STUB
        script.write_text(_START_STUB.format(empty=empty, stub=stub), encoding="utf-8")
        for program in (stub, script):
            program.chmod(0o755)  # installers of wheels may drop the run bit
        return backends

    def remove(self) -> None:
        """Delete the directory and the server's shared-memory regions. Repeatable."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1
        _remove(self.path)


def is_plain(path: str | Path) -> bool:
    """Return whether Triton can be given the name of a file, which it does not quote."""
    return _PLAIN.fullmatch(str(path)) is not None


def remove_stale() -> None:
    """Delete what servers of this user left behind whose processes are all gone."""
    for path in Path(_parent()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # not ours, not a run directory, or being made at this moment
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
        except OSError:
            pass  # in use
        finally:
            os.close(lock)


def _parent() -> str:
    folder = tempfile.gettempdir()
    return folder if is_plain(folder) else _PLAIN_TEMPORARY


def _link_content(source: Path, target: Path, *, but: str) -> None:
    for each in source.iterdir():
        if each.name not in (but, "__pycache__"):
            (target / each.name).symlink_to(each)


def _remove(path: Path) -> None:
    for region in _SHARED_MEMORY.glob(f"{path.name}-*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
