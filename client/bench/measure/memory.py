"""Memory of a server's processes."""

from __future__ import annotations

import psutil

from client.bench.errors import BenchError


def tree_memory(pid: int) -> int:
    """Return the bytes used by a process and its descendants, shared pages divided (PSS).

    Raises:
        BenchError: one belongs to another user and cannot be inspected.
    """
    total = 0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            raise BenchError(
                f"the memory of process {process.pid} of the server cannot be read: it is "
                "another user's"
            ) from None
    return total
