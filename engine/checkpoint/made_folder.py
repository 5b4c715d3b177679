"""Folders in the user's cache that stand for a checkpoint which is no folder of its own."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from engine.errors import CheckpointError


def made_folder(kind: str, stem: str, key: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder for `key`, which `fill` fills if it is not there yet.

    It lies in `$XDG_CACHE_HOME/trident/KIND` (`~/.cache/trident/KIND`), or where that cannot be
    written to, in the temporary directory. Processes that make it at the same time do not harm each
    other.

    Args:
        stem: what its name begins with.
        key: all that it depends on.

    Raises:
        CheckpointError: there is no place for it.
    """
    name = f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    parent = _cache(kind)
    if not (parent / name).is_dir():
        with tempfile.TemporaryDirectory(dir=parent) as temporary:
            made = Path(temporary) / name
            made.mkdir()
            fill(made)
            with suppress(OSError):  # another process was faster
                made.rename(parent / name)
    return parent / name


def _cache(kind: str) -> Path:
    for directory in _directories(kind):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK | os.X_OK):
                return directory
        except OSError:
            continue
    raise CheckpointError(
        f"no directory for {kind} files is writable; set XDG_CACHE_HOME to one that is",
        param="model",
    )


def _directories(kind: str) -> Iterator[Path]:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # XDG ignores relative paths
        cache = os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        yield Path(cache) / "trident" / kind
    yield Path(tempfile.gettempdir()) / f"trident-{kind}.{os.getuid()}"
