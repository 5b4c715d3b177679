"""The files that `trident bench` writes."""

from pathlib import Path

from client.bench.errors import BenchError


def require_writable(flag: str, path: Path) -> None:
    """Create the file that `flag` names now: what is measured takes minutes, and must not be lost.

    Raises:
        BenchError: it cannot be written.
    """
    try:
        path.touch()
    except OSError as error:
        raise BenchError(f"{flag}: cannot write {path}: {error.strerror}") from None
