"""The memory of a server's processes."""

from __future__ import annotations

import psutil

from client.bench.errors import BenchError


def tree_memory(pid: int) -> int:
    """Return the bytes that a process and its descendants hold, shared pages counted once (PSS).

    Raises:
        BenchError: one of them is another user's, of whose memory nothing is told.
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
