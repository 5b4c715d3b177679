"""What git leaves of a large file when it has no git-lfs: a few lines that point to it."""

from contextlib import suppress
from pathlib import Path

from engine.errors import CheckpointError

_BEGINNING = b"version https://git-lfs.github.com/spec/"


def unreadable(file: Path, otherwise: str, *, param: str | None = None) -> CheckpointError:
    """Return the error for `file`, which has another content than its name suggests.

    Its message is `otherwise`, unless the file is such a pointer.

    Args:
        param: what the error calls the file; default: its path.
    """
    with suppress(OSError), file.open("rb") as content:
        if content.read(len(_BEGINNING)) == _BEGINNING:
            return CheckpointError(
                "is a pointer of Git LFS, not the file itself; run `git lfs pull` in its folder",
                param=str(file),
            )
    return CheckpointError(otherwise, param=param or str(file))
