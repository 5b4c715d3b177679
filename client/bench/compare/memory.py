"""The memory of a server's processes."""

from __future__ import annotations

from contextlib import suppress

import psutil


def tree_memory(pid: int) -> int:
    """Return the bytes that a process and its descendants hold, shared pages counted once (PSS)."""
    total = 0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total
