"""Output files of `trident bench`."""

from pathlib import Path

from client.bench.errors import BenchError


def require_writable(flag: str, path: Path) -> None:
    """Create the file given by `flag` now, as a measurement of minutes must not be lost.

    Raises:
        BenchError: the file cannot be written.
    """
    try:
        path.touch()
    except OSError as error:
        raise BenchError(f"{flag}: cannot write {path}: {error.strerror}") from None
