"""Ends a stub when tritonserver has gone: by itself a stub notices that only after minutes."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

log = logging.getLogger("trident.parent")

_INTERVAL_S = 0.5
_SHARED_MEMORY = Path("/dev/shm")
_REGION_ARGUMENT = 2  # of the stub's command line: program, model.py, name of its region, ...


def end_with_parent() -> None:
    """Watch, in a thread, for the death of the parent process; then exit at once.

    A killed tritonserver leaves each stub's shared-memory region behind; the stub removes its own.
    """
    # Not PR_SET_PDEATHSIG: that strikes already when the thread that started the stub ends.
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL_S)
    log.warning("tritonserver has gone: this stage ends")
    remove_region(Path("/proc/self/cmdline").read_bytes())
    os._exit(1)


def remove_region(command_line: bytes, shared_memory: Path = _SHARED_MEMORY) -> None:
    """Delete the region that a stub's `command_line`, of arguments that end with NUL, names."""
    arguments = command_line.split(b"\0")
    if len(arguments) > _REGION_ARGUMENT and (name := arguments[_REGION_ARGUMENT].decode()):
        region = shared_memory / name
        if region.parent == shared_memory and region.is_file():
            region.unlink()
