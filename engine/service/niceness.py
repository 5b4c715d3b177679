"""Niceness of threads: what is on its way to a client goes before what has not begun."""

from __future__ import annotations

import os

_NICER = 5  # a third of the weight of the others
_NICEST = 19


def give_way() -> None:
    """Have the calling thread run after those of tritonserver and of the detokenizer.

    On few cores each response waits in every stage until a thread runs, the longest in the
    detokenizer, which takes one after the other. Threads that this one starts later, and processes,
    are as nice, and cannot go back.
    """
    this_thread = 0  # Linux has a niceness of each thread, where POSIX has one of the process
    nicer = os.getpriority(os.PRIO_PROCESS, this_thread) + _NICER
    os.setpriority(os.PRIO_PROCESS, this_thread, min(nicer, _NICEST))
