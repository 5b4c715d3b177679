"""Returns freed but cached memory to the operating system (malloc_trim)."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Give freed memory back to the system, of which glibc keeps what lies between used pieces.

    After weights have been converted piece by piece, that is a tenth of them and more.
    """
    ctypes.CDLL(None).malloc_trim(0)
