"""The engine's parts: decode steps, prefill and TTFT, each with its floor."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from engine.bench import floors
from engine.bench.checkpoint import write_checkpoint
from engine.bench.gpu.part import Figures, Group, Part
from engine.bench.kernels.case import Aim
from engine.bench.kernels.shapes import Shape
from engine.bench.steps import Steps
from engine.config.engine_config import EngineConfig

_REPEATS = 5  # of a prefill
_AIMS = {
    ("0.5b", 1): Aim(seconds=600e-6),
    ("8b", 1): Aim(share=0.85),
    ("8b", 64): Aim(share=0.75),
    ("8b", 256): Aim(share=0.75),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """The sizes of one run, in tokens unless stated otherwise.

    Attributes:
        context: of each sequence in a decode step, averaged over the measured steps.
        decode_steps: number of measured steps, after `warm_up_steps` others.
        batches: sequences in a decode step, the most important first.
        prefill: tokens of a prefill step.
        prompt: of a single request.
    """

    context: int = 1024
    decode_steps: int = 48
    warm_up_steps: int = 8
    batches: tuple[int, ...] = (1, 256, 64, 16)
    prefill: int = 8192
    prompt: int = 1024

    @property
    def max_model_len(self) -> int:
        """The length of the longest sequence."""
        return max(self.prefill, 2 * self.context) + 16


FULL = Workload()
SMALL = Workload(48, 6, 2, (1, 8), 64, 32)


def group(shape: Shape, workload: Workload) -> Group:
    """Return all parts of a model, the most important first."""

    def decode(batch: int) -> Part:
        return Part(
            f"{shape.label} decode step, B = {batch}",
            partial(EngineSession.decode, batch=batch),
            lambda figures, ceilings: floors.decode_seconds(
                shape, batch, round(batch * figures["context"]), ceilings
            ),
            _AIMS.get((shape.label, batch)),
        )

    def prefill(name: str, lengths: list[int], aim: Aim | None) -> Part:
        return Part(
            f"{shape.label} {name}",
            partial(EngineSession.prefill, lengths=lengths),
            lambda figures, ceilings: floors.prefill_seconds(shape, lengths, ceilings),
            aim,
        )

    long = workload.prefill
    parts = (
        *(decode(batch) for batch in workload.batches),
        prefill(f"prefill, 1 x {long} tokens", [long], Aim(share=0.6)),
        prefill(f"prefill, 8 x {long // 8} tokens", [long // 8] * 8, Aim(share=0.6)),
        prefill(f"TTFT of {workload.prompt} tokens alone", [workload.prompt], None),
    )
    return Group(f"{shape.label} engine", "engine", parts, partial(EngineSession, shape, workload))


class EngineSession(Steps):
    """An engine with dummy weights, with the settings of TRIDENT_* variables."""

    def __init__(self, shape: Shape, workload: Workload, device: torch.device) -> None:
        self.workload, self._has_gpu = workload, device.type == "cuda"
        with TemporaryDirectory() as folder:
            write_checkpoint(shape, Path(folder))
            settings = {
                **EngineConfig.overrides(os.environ),
                "model": folder,
                "load_format": "dummy",
                "device": device.type,
                "max_model_len": workload.max_model_len,
                "max_num_seqs": max(workload.batches),
                "max_num_batched_tokens": max(workload.prefill, *workload.batches),
            }
            super().__init__(settings)

    def decode(self, batch: int) -> Figures:
        """Return the seconds of a step of `batch` sequences."""
        count, before = self.workload.decode_steps, self.workload.warm_up_steps
        # The middle step has the workload's context.
        self.fill(batch, self.workload.context - before - count // 2)
        self.run(before, batch)
        context = sum(each.num_tokens for each in self.core.scheduler.running) / batch
        self._synchronize()
        start = time.perf_counter()
        self.run(count, batch)
        self._synchronize()
        seconds = (time.perf_counter() - start) / count
        return {
            "seconds": seconds,
            "tokens_per_second": batch / seconds,
            "context": context + count / 2,
        }

    def prefill(self, lengths: list[int]) -> Figures:
        """Return the seconds from the arrival of prompts to their first tokens, in one step."""
        times = []
        for seed in range(_REPEATS + 1):  # other prompts each time, to miss the prefix cache
            prompts = self.prompts(lengths, seed=seed)
            self._synchronize()
            start = time.perf_counter()
            self.add(prompts, max_tokens=1)
            while self.core.has_unfinished_requests():
                self.core.step()
            self._synchronize()
            times.append(time.perf_counter() - start)
        return {"seconds": median(times[1:])}  # the first may include compilation

    def _synchronize(self) -> None:
        if self._has_gpu:
            torch.cuda.synchronize()
