"""Ledger: a few numbers that the workers of a gateway share."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

_NUMBER_BYTES = 8


class Ledger:
    """Numbers in memory; with a file, those of every process that has opened it.

        with ledger as numbers:
            numbers[0] += 1

    Nobody else is in the block meanwhile. A process that is killed there lets the next one in: the
    lock is the kernel's.
    """

    def __init__(self, size: int, file: Path | None = None) -> None:
        """Open `size` numbers; they are 0 at first."""
        length = max(size, 1) * _NUMBER_BYTES
        self._lock = None if file is None else os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        if self._lock is not None:
            os.ftruncate(self._lock, length)
        memory = mmap.mmap(-1 if self._lock is None else self._lock, length)
        self._numbers: memoryview[float] = memoryview(memory).cast("d")

    def __enter__(self) -> memoryview[float]:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self._numbers

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
