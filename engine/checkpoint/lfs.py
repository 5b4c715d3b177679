"""What git leaves of a large file when it has no git-lfs: a few lines that point to it."""

from contextlib import suppress
from pathlib import Path

from engine.errors import CheckpointError

_BEGINNING = b"version https://git-lfs.github.com/spec/"


def unreadable(file: Path, otherwise: str) -> CheckpointError:
    """Return the error for `file`, which has another content than its name suggests.

    Its text is `otherwise`, unless the file is such a pointer.
    """
    with suppress(OSError), file.open("rb") as content:
        if content.read(len(_BEGINNING)) == _BEGINNING:
            return CheckpointError(
                f"{file}: is a pointer of Git LFS, not the file itself; run `git lfs pull` in its "
                "folder"
            )
    return CheckpointError(otherwise)
