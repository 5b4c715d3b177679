"""The kernels' parts: the time of each case beside torch's."""

from __future__ import annotations

import gc
import time
from functools import partial

import torch
from torch import Tensor

from engine.bench import floors
from engine.bench.ceilings import gpu_seconds, timed
from engine.bench.gpu.part import Figures, Group, Part
from engine.bench.kernels.case import Call, Case, Work
from engine.bench.kernels.cases import all_cases, tiny_cases

# Seconds for all of torch.compile: the slowest part, and not our code.
_COMPILE_SECONDS = 60.0


def group(*, tiny: bool) -> Group:
    """Return the parts of all cases, those with an aim first."""
    parts = tuple(
        Part(case.key, partial(KernelSession.measure, case=case), _floor, case.aim)
        for case in (tiny_cases() if tiny else all_cases())
    )
    return Group("kernels", "kernels", parts, KernelSession)


def _floor(figures: Figures, ceilings: floors.Ceilings) -> float:
    flops = figures["flops"]
    return floors.bound(0 if flops else figures["bytes"], flops, ceilings)


class KernelSession:
    """Measures cases one by one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._compile_seconds = device, _COMPILE_SECONDS
        gc.freeze()  # each graph capture runs the garbage collector

    def measure(self, case: Case) -> Figures:
        """Return the seconds of our kernel, what it moves, and torch's seconds."""
        work = case.build(**case.shape, device=self._device)
        result = work.outcome(work.ours)
        figures = {
            "seconds": self._seconds(work, work.ours),
            "bytes": work.bytes,
            "flops": work.flops,
        }
        peers = {name: self._peer(work, call, result) for name, call in work.peers.items()}
        if case.compile and work.compiled is not None:
            peers["torch.compile"] = self._compiled(work, work.compiled, result)
        return {**figures, "peers": peers}

    def clear(self) -> None:
        """Free the memory of a case."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _seconds(self, work: Work, call: Call) -> float:
        if self._device.type == "cuda":
            return gpu_seconds(call, graph=work.graph)
        return timed(call, 1e-3).median

    def _peer(self, work: Work, call: Call, ours: tuple[Tensor, ...]) -> Figures:
        """Return the time of a torch implementation, unless it fails or its results differ."""
        try:
            if difference := work.differs(ours, work.outcome(call)):
                return {"differs": difference}
            return {"seconds": self._seconds(work, call)}
        except Exception as error:
            return {"reason": f"{type(error).__name__}: {str(error).strip()[:300]}"}

    def _compiled(self, work: Work, call: Call, ours: tuple[Tensor, ...]) -> Figures:
        if self._compile_seconds <= 0:
            return {"reason": f"{_COMPILE_SECONDS:.0f} s of compilation were over"}
        start = time.monotonic()
        torch._dynamo.reset()
        compiled = Call(torch.compile(call.func, dynamic=False), *call.args, **call.keywords)
        try:
            return self._peer(work, compiled, ours)
        finally:
            self._compile_seconds -= time.monotonic() - start
