"""RepeatedSteps: runs each step of a model runner several times, and compares all results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.schedule import SamplerOutput, SamplingBatch, SchedulerOutput
from engine.execution.model_runner import ModelRunner
from engine.execution.pending_step import PendingStep
from kernels.step.sampling_columns import SKIPPED

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRESS_BYTES = 64 * 2**20  # more than the L2 cache of any GPU
_STRESS_COPIES = 40  # take about as long as a step

Results = dict[str, Tensor]


class RepeatedSteps:
    """A runner of steps that passes them on to `runner`, more than once.

    Attributes:
        repeats: runs of the next steps as they are served, and as many kernel by kernel; 1: none
            is compared.
        num_steps: run since the last `clear`, each counted once.
    """

    def __init__(self, runner: ModelRunner) -> None:
        """Run the steps of `runner`, which must have none in flight."""
        self.repeats = 1
        self.num_steps = 0
        self._runner = runner
        self._differences: list[str] = []
        self._kinds: Counter[str] = Counter()
        self._logits: Tensor | None = None
        self._stress = _Stress(runner.device) if runner.device.type == "cuda" else None
        compute_logits = runner.model.compute_logits

        def watched(hidden: Tensor) -> Tensor:
            logits = compute_logits(hidden)
            # Sampling overwrites them. What is captured in a graph shows in the tokens alone.
            self._logits = logits.clone()
            return logits

        runner.model.compute_logits = watched  # type: ignore[method-assign]

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero all that steps change on the device, and the number of steps."""
        self.num_steps = 0
        for tensor in self._runner.state.values():
            tensor.zero_()

    def take_differences(self) -> list[str]:
        """Return what differed between runs of the same step since the last call."""
        found, self._differences = self._differences, []
        return found

    def take_kinds(self) -> Counter[str]:
        """Return the number of compared steps by kind since the last call."""
        found, self._kinds = self._kinds, Counter()
        return found

    def forward(self, schedule: SchedulerOutput) -> None:
        """Keep the schedule of a step for `sample`."""
        self._schedule = schedule

    @torch.inference_mode()
    def sample(self, sampling: SamplingBatch) -> PendingStep:
        """Run the step, repeatedly from the same state; return the last run."""
        self.num_steps += 1
        if self.repeats == 1:
            return self._run(sampling)[0]
        self._count()
        before = {name: tensor.clone() for name, tensor in self._runner.state.items()}
        if self._runner._graphs is not None:
            with self._without_graphs():
                self._compare("kernel by kernel", sampling, before)
        return self._compare("as served", sampling, before)

    def expert_counts(self) -> NDArray[Any] | None:
        """Return how often each expert was chosen, in all runs together."""
        return self._runner.expert_counts()

    def _compare(self, form: str, sampling: SamplingBatch, before: Results) -> PendingStep:
        expected: Results = {}
        for repeat in range(self.repeats):
            for name, tensor in self._runner.state.items():
                tensor.copy_(before[name])
            if self._stress is not None and repeat % 2:
                self._stress.begin()
            pending, found = self._run(sampling)
            if not expected:
                expected = {name: tensor.clone() for name, tensor in found.items()}
            elif different := _different(expected, found):
                text = f"{form}, run {repeat + 1} of {self.repeats}: {', '.join(different)}"
                self._differences.append(text)
        return pending

    def _run(self, sampling: SamplingBatch) -> tuple[PendingStep, Results]:
        """Run the step once; return what it gave."""
        runner, schedule = self._runner, self._schedule
        self._logits = None
        runner.forward(schedule)
        launched = runner._launched
        assert launched is not None
        pending = runner.sample(sampling)
        found = _samples(pending.wait())
        results = launched[1]
        hidden, slots = results.hidden[: schedule.num_rows], results.slots[: schedule.num_rows]
        # Rows for which no token is sampled are undefined.
        sampled = slots >= 0
        found |= {"slots": slots, "hidden states": _rows(hidden, sampled)}
        if self._logits is not None:
            # A graph computes those of padding too, where replaying it runs this again.
            logits = self._logits[: len(sampled)]
            found["logits"] = _rows(logits, sampled[: len(logits)])
        return pending, found | runner.state

    def _count(self) -> None:
        schedule = self._schedule
        decodes = schedule.num_decodes == schedule.num_rows
        kind = "decode" if decodes else "mixed" if schedule.num_decodes else "prefill"
        self._kinds[kind] += 1

    @contextmanager
    def _without_graphs(self) -> Iterator[None]:
        graphs, self._runner._graphs = self._runner._graphs, None
        try:
            yield
        finally:
            self._runner._graphs = graphs


class _Stress:
    """Copies on a second stream, which take bandwidth and SMs from the first.

    No matrix products: cuBLAS may choose other algorithms while several streams use it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._source = torch.zeros(_STRESS_BYTES, dtype=torch.uint8, device=device)
        self._target = torch.empty_like(self._source)

    def begin(self) -> None:
        """Launch the copies behind what the current stream has, without waiting."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_STRESS_COPIES):
                self._target.copy_(self._source)


def _samples(samples: SamplerOutput) -> Results:
    """Return tokens, finish reasons and log-probabilities, of the sequences that had not ended."""
    taken = samples.finish_reasons != SKIPPED
    found = {"finish reasons": samples.finish_reasons, "tokens": samples.token_ids[taken]}
    if (asked := samples.logprobs) is not None:
        kept = taken[asked.rows]
        valid = np.arange(asked.top_token_ids.shape[1]) < asked.num_top[kept, None]
        found |= {
            "log-probabilities": asked.logprobs[kept],
            "ranks": asked.ranks[kept],
            "most likely tokens": asked.top_token_ids[kept][valid],
            "their log-probabilities": asked.top_logprobs[kept][valid],
        }
    return {name: torch.from_numpy(values) for name, values in found.items()}


def _rows(values: Tensor, defined: Tensor) -> Tensor:
    """Return a copy of `values` [R, N] with zeros in the rows that are not `defined` [R]."""
    return torch.where(defined[:, None], values, 0)


def _different(expected: Results, found: Results) -> list[str]:
    """Return the names of the tensors whose bits are not equal."""
    if expected.keys() != found.keys():
        return ["which results there are"]
    names = [name for name in found if expected[name].shape != found[name].shape]
    flags = {
        name: (_bits(expected[name]) != _bits(found[name])).any()
        for name in found
        if name not in names
    }
    on_device = [name for name, flag in flags.items() if flag.is_cuda]
    if on_device:  # read all of them at once
        values = torch.stack([flags[name] for name in on_device]).cpu()
        flags |= dict(zip(on_device, values, strict=True))
    return names + [name for name, flag in flags.items() if flag]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])
