"""Measures cases in a separate process, which a faulting kernel may crash.

Reads one request from standard input, and writes JSON lines: the ceilings, then each case as it
begins and as it ends. A request to compile only is answered by exiting.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.bench import timing
from kernels.bench.case import Call, Case, Work
from kernels.bench.operations import all_cases, tiny_cases
from kernels.bench.resources import Multiprocessor, describe, launches

MARK = "@@ "  # prefix of messages; other output is ignored
# Seconds for all of torch.compile: the slowest part, and not our code.
_COMPILE_SECONDS = 60.0
_COMPILE_MEMORY = 0.1  # share of the GPU's memory while only compiling


class Watch(Protocol):
    """Times a call that has been called before."""

    def micros(self, call: Call, *, graph: bool) -> float: ...


class Bench:
    """Measures cases one by one on `device`.

    Args:
        processor: the device's SM, None in the interpreter.
    """

    def __init__(
        self, watch: Watch, device: torch.device, processor: Multiprocessor | None = None
    ) -> None:
        self._watch, self._device, self._processor = watch, device, processor
        self._compile_seconds = _COMPILE_SECONDS

    def measure(self, case: Case) -> dict[str, Any]:
        """Return the figures of `case`, or why there are none; never raises."""
        try:
            return self._measure(case)
        except torch.OutOfMemoryError as error:
            return {"status": "skipped", "reason": first_line(error)}
        except Exception as error:
            return {"status": "failed", "reason": first_line(error)}
        finally:
            _release(self._device)

    def _measure(self, case: Case) -> dict[str, Any]:
        work = case.build(**case.shape, device=self._device)
        with launches() as kernels:
            result = work.outcome(work.ours)
        figures: dict[str, Any] = {
            "status": "measured",
            "micros": self._watch.micros(work.ours, graph=work.graph),
            "bytes": work.bytes,
            "flops": work.flops,
            "kernels": describe(kernels, self._processor) if self._processor else [],
        }
        peers = {name: self._peer(work, call, result) for name, call in work.peers.items()}
        if case.compile:
            for name, call in work.compiled.items():
                peers[name] = self._compiled(work, call, result)
        return {**figures, "peers": peers}

    def _peer(self, work: Work, call: Call, ours: tuple[Tensor, ...]) -> dict[str, Any]:
        """Return the time of a torch implementation, unless it fails or its results differ."""
        try:
            difference = work.differs(ours, work.outcome(call))
            if difference:
                return {"differs": difference}
            return {"micros": self._watch.micros(call, graph=work.graph)}
        except Exception as error:
            return {"reason": first_line(error)}

    def _compiled(self, work: Work, call: Call, ours: tuple[Tensor, ...]) -> dict[str, Any]:
        if self._compile_seconds <= 0:
            return {"reason": f"{_COMPILE_SECONDS:.0f} s of compilation were over"}
        start = time.monotonic()
        torch._dynamo.reset()
        compiled = Call(torch.compile(call.func, dynamic=False), *call.args, **call.keywords)
        try:
            return self._peer(work, compiled, ours)
        finally:
            self._compile_seconds -= time.monotonic() - start


def compile_kernels(cases: Sequence[Case], device: torch.device) -> None:
    """Run every case once, to have its kernels in Triton's disk cache; never raises."""
    for case in cases:
        with suppress(Exception):  # reported when it is measured
            case.build(**case.shape, device=device).ours()
        _release(device)


def usable() -> bool:
    """Return whether the GPU, if any, responds: a fault breaks the process's CUDA context."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _release(device: torch.device) -> None:
    """Free the memory of the case before."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # after a fault
            torch.cuda.empty_cache()


def clock(device: torch.device) -> Watch:
    """Return what times calls on `device`."""
    return timing.Stopwatch() if device.type == "cuda" else WallClock()


class WallClock:
    """Times calls on a CPU."""

    def micros(self, call: Call, *, graph: bool) -> float:
        """Return the microseconds that one call takes."""
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)


def serve(request: dict[str, Any], device: torch.device, *, tiny: bool = False) -> None:
    """Measure the cases named in `request` until its deadline, or compile their kernels.

    Args:
        tiny: measure those of `tiny_cases`; also on a CPU, by wall time.
    """
    cases = {case.key: case for case in (tiny_cases() if tiny else all_cases())}
    if request["compile_only"]:
        # The tests need memory and the cores at the same time. Kernels do not depend on the number
        # of rows, so a smaller case compiles the kernels of one that does not fit.
        os.nice(10)
        torch.cuda.set_per_process_memory_fraction(_COMPILE_MEMORY)
        compile_kernels([cases[key] for key in request["cases"]], device)
        return
    watch = clock(device)
    bench = Bench(watch, device)
    if isinstance(watch, timing.Stopwatch):
        gc.freeze()  # each graph capture runs the garbage collector
        if request["ceilings"]:
            say({"ceilings": timing.ceilings(watch)})
        bench = Bench(watch, device, Multiprocessor.of(device))
    for key in request["cases"]:
        if time.time() > request["deadline"]:
            say({"case": key, "status": "left out", "reason": "no time was left"})
            continue
        say({"begins": key})
        say({"case": key, **bench.measure(cases[key])})
        if not usable():
            sys.exit("the GPU is of no use to this process any more")


def say(message: dict[str, Any]) -> None:
    """Send a message to `kernels.bench.runner`."""
    print(MARK + json.dumps(message), flush=True)


def first_line(error: Exception) -> str:
    """Return the first line of an error, with its type."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"


if __name__ == "__main__":
    _device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    serve(json.load(sys.stdin), _device, tiny="--tiny" in sys.argv)
