"""What was measured on this machine is remembered, so that restarts are fast and do as before.

The file is `$XDG_CACHE_HOME/trident/measurements.json` (`~/.cache/trident/measurements.json`); to
measure again, delete it. Where it cannot be read or written, each start measures.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import torch

from kernels.cpu.library import library_name
from kernels.cpu.target import processor_name

log = logging.getLogger("trident.engine")

T = TypeVar("T")

_MOST_ENTRIES = 100  # of the latest
_QUIET = 0.1  # share of the processors that others may take meanwhile
_LEAST_S = 0.1  # ten ticks of the clock that counts what they take


def remembered(subject: object, measure: Callable[[], T], kind: type[T]) -> T:
    """Return what `measure` returns, from an earlier start if it is remembered.

    It is remembered for this processor, number of cores, torch and kernels, unless other programs
    took much of the processor's time while it was measured, or it took so little that the system's
    clock does not tell.

    Args:
        subject: what is measured, distinct by its `repr`.
        kind: of the result, which must be one that JSON can hold.
    """
    key = _key(subject)
    path = _path()
    entries = _read(path)
    if (found := entries.get(key)) is not None:
        try:
            return msgspec.json.decode(found, type=kind)
        except (msgspec.MsgspecError, RecursionError):
            log.warning("%s: not what it should be, measured again", path)
    others = _OthersTime()
    value = measure()
    if others.share() <= _QUIET:
        entries.pop(key, None)
        latest = [*entries.items(), (key, msgspec.Raw(msgspec.json.encode(value)))]
        _write(path, dict(latest[-_MOST_ENTRIES:]))
    return value


def _key(subject: object) -> str:
    machine = (processor_name(), os.cpu_count(), torch.__version__, library_name())
    return hashlib.sha256(repr((machine, subject)).encode()).hexdigest()


def _path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the standard says to ignore such
        cache = os.path.expanduser("~/.cache")
    return Path(cache) / "trident" / "measurements.json"


def _read(path: Path) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s: cannot be read, measured again: %s", path, error)
        return {}


def _write(path: Path, entries: dict[str, msgspec.Raw]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(entries))
        os.replace(file.name, path)  # whole at any time, whoever else writes
    except OSError as error:
        log.info("Measurements are not remembered: %s", error)


class _OthersTime:
    """The processor time that other programs have taken since this was made."""

    def __init__(self) -> None:
        self._begin = time.monotonic(), self._busy_s()

    def share(self) -> float:
        """Return their share of all processors' time, 1 if it cannot be told yet."""
        then, busy_s = self._begin
        elapsed_s = time.monotonic() - then
        if elapsed_s < _LEAST_S:
            return 1.0
        return (self._busy_s() - busy_s) / (elapsed_s * (os.cpu_count() or 1))

    @staticmethod
    def _busy_s() -> float:
        all_times = psutil.cpu_times()
        own = psutil.Process().cpu_times()
        idle = all_times.idle + getattr(all_times, "iowait", 0.0)
        return sum(all_times[:8]) - idle - own.user - own.system
