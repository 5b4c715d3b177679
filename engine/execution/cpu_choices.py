"""Backends that serve a model on a CPU, chosen by measuring on this machine, once for all starts.

What was measured is remembered in `$XDG_CACHE_HOME/trident/measurements.json`
(`~/.cache/trident/measurements.json`), so that restarts are fast and do as before; to measure
again, delete it. Where it cannot be read or written, each start measures.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import torch

from engine.config.setting_types import Quantization
from engine.models.causal_lm import CausalLM
from engine.models.process_weights import (
    GemmChoice,
    can_choose,
    measure_gemms,
    projection_shapes,
)
from kernels.cpu.library import library_name
from kernels.cpu.target import processor_name

# Where a container's share of the cores is: cgroup v2, then v1.
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CFS_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_CFS_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")

_REPEATS = 5
# A step that takes so long has enough work for all cores. What else starts at the same time, such
# as the other stages, would disturb the choice.
_LONG_S = 0.02
_GAIN = 0.95  # more threads must take less than this of the time: others need the cores too

log = logging.getLogger("trident.engine")

T = TypeVar("T")

_MOST_ENTRIES = 100  # of the latest
_QUIET = 0.1  # share of the processors that others may take meanwhile
_LEAST_S = 0.1  # ten ticks of the clock that counts what they take


def remembered(subject: object, measure: Callable[[], T], kind: type[T]) -> T:
    """Return what `measure` returns, from an earlier start if it is remembered.

    It is remembered for this processor, number of cores, torch and kernels, unless other programs
    took much of the processor's time while it was measured, or it took so little that the system's
    clock does not show it.

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
    if not os.path.isabs(cache):  # XDG ignores relative paths
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
        """Return the share of CPU time that other processes use; 1 if it is not known yet."""
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


def most_threads() -> int:
    """Return the most threads that torch's operations may have.

    At most torch's own number, from OMP_NUM_THREADS or the process's cores, and at most the cores
    of the container's CPU quota: more threads would be throttled while others wait for them.
    """
    return max(1, min(torch.get_num_threads(), _quota()))


def choose_num_threads(most: int, run_step: Callable[[], None]) -> int:
    """Return the number of threads, up to `most`, with which `run_step` is fastest.

    torch has another number of threads afterwards.
    """
    torch.set_num_threads(most)
    run_step()  # warm-up
    if _seconds(run_step) > _LONG_S:
        return most
    best, best_s = 1, math.inf
    for num_threads in sorted({*(2**i for i in range(most.bit_length())), most}):
        torch.set_num_threads(num_threads)
        run_step()  # starts the threads
        step_s = min(_seconds(run_step) for _ in range(_REPEATS))
        if step_s < _GAIN * best_s:
            best, best_s = num_threads, step_s
    return best


def _seconds(run_step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run_step()
    return time.perf_counter() - begin


def _quota() -> int:
    """Return the cores that the container may use at a time; a large number without a limit."""
    try:
        if _CPU_MAX.exists():
            quota, period = _CPU_MAX.read_text().split()
        else:
            quota, period = _CFS_QUOTA.read_text(), _CFS_PERIOD.read_text()
        return math.ceil(int(quota) / int(period)) if int(quota) > 0 else 2**31
    except (OSError, ValueError):  # no container, or "max": no limit
        return 2**31


def set_num_threads(subject: object, run_step: Callable[[], None]) -> int:
    """Choose and set the number of threads of torch's operations; return it.

    Args:
        subject: the model and the settings of the step, distinct by `repr`.
        run_step: runs a typical step.
    """
    most = most_threads()
    measure = partial(choose_num_threads, most, run_step)
    num_threads = remembered(("threads", most, subject), measure, int)
    torch.set_num_threads(num_threads)
    return num_threads


def is_own_gemm_faster(
    model: CausalLM,
    dtype: torch.dtype,
    quantization: Quantization | None,
    on_progress: Callable[[str], None],
) -> bool:
    """Return whether our GEMM serves `model`, not oneDNN's.

    Args:
        model: before its weights are processed, which may be on any device.
        on_progress: called with the measurements, if there is something to choose.
    """
    int8 = quantization == "int8"
    shapes = projection_shapes(model)
    if quantization == "int4" or not can_choose(shapes, dtype, int8=int8):
        return True
    subject = ("gemm", sorted(shapes.items(), key=repr), dtype, int8, torch.get_num_threads())
    measure = partial(measure_gemms, shapes, dtype, int8=int8)
    choice = remembered(subject, measure, GemmChoice)
    on_progress(choice.summary())
    return choice.own_gemm
