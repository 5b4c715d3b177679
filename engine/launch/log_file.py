"""The file that a server logs to. It outlives a server that fails; the last few are kept.

It lies in `$XDG_STATE_HOME/trident` (`~/.local/state/trident`), or where that cannot be written to,
in `trident.<user id>` in the temporary directory. The server's processes inherit a lock on it, by
which a running server's file is known from one that was left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from engine.launch.errors import ServerStartError

_SUFFIX = ".log"
_EARLIER = ".1"
_NUM_KEPT = 5  # logs of servers that have ended
_MAX_BYTES = 32 << 20
_TAIL_BYTES = 4 << 20


class LogFile:
    """The log of one server, which may be started several times; made at construction.

    Args:
        name: of the run, which no other one has.
        max_bytes: when more has been read, the content becomes the file `PATH.1` in place of an
            earlier one, and the file begins anew.

    Attributes:
        path: the file.

    Raises:
        ServerStartError: there is no directory for it.
    """

    def __init__(self, name: str, max_bytes: int = _MAX_BYTES) -> None:
        directory = log_directory()
        _remove_old(directory)
        self.path = directory / f"{name}{_SUFFIX}"
        self._max_bytes = max_bytes
        self._position = 0
        self._opened_at = 0

    def open(self) -> BinaryIO:
        """Open the file for a server to write to, with the lock; `tail` begins here from now on."""
        # Appending: when the file begins anew, so does its writer.
        file = self.path.open("ab")
        with suppress(BlockingIOError):  # a process of the server before this one is still there
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._opened_at = file.tell()
        self._position = min(self._position, self._opened_at)  # somebody may have deleted the file
        return file

    def write(self, line: str) -> None:
        """Add a line of the launcher's own; without the file nothing happens."""
        with suppress(OSError):
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(file, f"{line}\n".encode())
            finally:
                os.close(file)

    def lines(self) -> Sequence[str]:
        """Return the complete lines that were added since the last call; none if it is gone."""
        complete = b""
        # A server goes on when somebody has deleted its log: nothing may be raised here.
        with suppress(OSError), self.path.open("r+b") as file:
            file.seek(self._position)
            content = file.read()
            complete = content[: content.rfind(b"\n") + 1]
            self._position += len(complete)
            if self._position > self._max_bytes and len(complete) == len(content):
                with suppress(OSError):  # a full disk
                    shutil.copyfile(self.path, f"{self.path}{_EARLIER}")
                file.truncate(0)  # lines written at this moment are lost
                self._position = self._opened_at = 0
        return complete.decode("utf-8", errors="replace").splitlines()

    def tail(self) -> str:
        """Return what the server has said since `open`, its last 4 MiB at most.

        Empty if the file is gone.
        """
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(self._opened_at, size - _TAIL_BYTES))
                return file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""

    def remove(self) -> None:
        """Delete the file, after the server has ended as intended."""
        _unlink(self.path)


def log_directory() -> Path:
    """Return the directory of all logs, made if need be.

    Raises:
        ServerStartError: there is none that only this user can write to.
    """
    candidates = list(_directories())
    for directory in candidates:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.lstat()
        except OSError:
            continue
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if is_ours and os.access(directory, os.W_OK | os.X_OK):
            return directory
    raise ServerStartError(
        f"the server's log cannot be written: {' and '.join(map(str, candidates))} cannot be used",
        "set XDG_STATE_HOME to a directory that you can write to",
    )


def _directories() -> Iterator[Path]:
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # XDG ignores relative paths
        state = os.path.expanduser("~/.local/state")
    if os.path.isabs(state):
        yield Path(state) / "trident"
    yield Path(tempfile.gettempdir()) / f"trident.{os.getuid()}"


def _remove_old(directory: Path) -> None:
    """Delete the logs of servers that have ended, but the last few."""
    ended = [path for path in directory.glob(f"*{_SUFFIX}") if not _is_in_use(path)]
    ended.sort(key=_modified)
    for path in ended[:-_NUM_KEPT]:
        _unlink(path)


def _is_in_use(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
    Path(f"{path}{_EARLIER}").unlink(missing_ok=True)
