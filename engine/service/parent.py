"""Ends a stub when tritonserver has died, which a stub notices by itself only after minutes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

log = logging.getLogger("trident.parent")

_INTERVAL_S = 0.5
_SHARED_MEMORY = Path("/dev/shm")

# Places on the command line of a stub, as release 24.10 starts it.
_PROGRAM, _REGION, _PARENT = 0, 2, 5
_STUB = "triton_python_backend_stub"


def end_with_parent() -> None:
    """Watch, in a thread, for the death of the parent process; then exit at once.

    Also ends the other stubs of that parent and removes their shared-memory regions: a stub that
    was just answering tritonserver waits for it for ever, and lets no Python thread run.
    """
    # Not PR_SET_PDEATHSIG: that fires already when the thread that started the stub ends.
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL_S)
    log.warning("tritonserver has gone: this stage ends")
    # All regions first, then all processes in one go: the other stubs are doing the same.
    stubs = list(_stubs_of(parent))
    for _, region in stubs:
        with contextlib.suppress(OSError):
            _remove_region(region)
    for stub, _ in stubs:
        if stub.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                stub.kill()
    os._exit(1)


def _stubs_of(parent: int) -> Iterator[tuple[psutil.Process, str]]:
    """Yield each stub that `parent` started, and the name of its shared-memory region."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_stub = len(words) > _PARENT and Path(words[_PROGRAM]).name == _STUB
            if is_stub and words[_PARENT] == str(parent):
                yield process, words[_REGION]


def _remove_region(name: str) -> None:
    region = _SHARED_MEMORY / name
    if region.parent == _SHARED_MEMORY and region.is_file():
        region.unlink()
