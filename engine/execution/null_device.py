"""The null device, for benchmarks of the host: it makes tokens up, at a set time per step.

Scheduler, blocks, plan, one step ahead, outputs and stages are those of a GPU. No weights are read,
no KV cache is allocated, and masks, biases and penalties have no effect on the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.ragged import Int32s
from engine.core.schedule import SamplingBatch, SchedulerOutput
from engine.errors import ConfigError
from engine.execution.devices import ResolvedConfig
from engine.execution.pending_step import PendingStep, PromptResults
from engine.execution.sampler import Sampler
from engine.execution.slot_writes import allocate_tables, slot_writes
from engine.models.spec import ModelSpec
from kernels.step.token_scatter import scatter_tokens

_CPU = torch.device("cpu")
_DIMENSIONS = 1024  # of an embedding


class NullDownload:
    """Made-up results that are there at a `time.monotonic()` second."""

    def __init__(self, arrays: list[NDArray[Any]], ready_at: float) -> None:
        self._arrays = arrays
        self._ready_at = ready_at

    def wait(self) -> list[NDArray[Any]]:
        """Sleep until the step is over; return them."""
        wait_s = self._ready_at - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        return self._arrays


class NullRunner:
    """Runs steps as `ModelRunner` does, one after the other, each in `step_s` seconds.

    A sequence's tokens depend on its seed, their positions and the masks of the host alone.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model_spec: ModelSpec,
        token_ids: Sequence[int],
        *,
        num_groups: int,
        max_model_len: int,
        step_s: float,
    ) -> None:
        """Make up tokens of `token_ids`, of those that the model has.

        Raises:
            ConfigError: it has none of them.
        """
        usable = [token_id for token_id in token_ids if token_id < model_spec.vocab_size]
        if not usable:
            raise ConfigError("null needs a tokenizer with tokens of text", param="device")
        self._token_ids = np.array(usable, dtype=np.int64)
        self._step_s = step_s
        self._schedule: SchedulerOutput | None = None  # waits for its sampling
        self._idle_from = 0.0  # time.monotonic() second
        self._seeds = np.zeros(config.max_num_seqs, dtype=np.uint64)  # by slot
        self._tables = allocate_tables(
            config,
            model_spec.vocab_size,
            max_model_len,
            _CPU,
            num_groups=num_groups,
            keeps_states=bool(model_spec.state_shapes),
        )
        self._sampler = Sampler(self._tables, model_spec.vocab_size)

    def forward(self, schedule: SchedulerOutput) -> None:
        """Launch the forward pass of a step with at least one row, without waiting for it."""
        self._sampler.admit(schedule.new_requests)
        self._seeds[schedule.new_requests.slots] = schedule.new_requests.seeds
        slot_writes(schedule, self._tables, schedule.num_rows).apply()
        self._schedule = schedule

    def sample(self, sampling: SamplingBatch) -> PendingStep:
        """Launch the sampling of the step whose forward pass was launched last."""
        assert self._schedule is not None
        schedule, plan = self._schedule, self._sampler.plan(self._schedule, sampling)
        wanted = plan.wants_token
        slots, positions = (
            column[: len(wanted)] for column in (schedule.slots, schedule.num_output_tokens)
        )
        if not plan.is_plain:
            plan.upload(_CPU)
        token_ids = self._tokens(self._seeds[slots], positions)
        for row, mask in zip(sampling.mask_rows, sampling.masks, strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token_ids[row] = allowed[token_ids[row] % len(allowed)]
        finish_reasons = scatter_tokens(
            self._tables,
            torch.from_numpy(np.where(wanted, slots, np.int32(-1))),
            torch.from_numpy(token_ids),
        )
        self._idle_from = max(self._idle_from, time.monotonic()) + self._step_s
        arrays: list[NDArray[Any]] = [token_ids, finish_reasons.numpy()]
        if len(plan.logprobs_rows):
            num_top = plan.num_top_logprobs
            arrays += self._logprobs(len(num_top), int(num_top.max()))
        return PendingStep(plan, NullDownload(arrays, self._idle_from), self._prompts(schedule))

    def expert_counts(self) -> None:
        """There are no experts."""

    def _tokens(self, seeds: NDArray[np.uint64], positions: Int32s) -> NDArray[np.int64]:
        indices = (seeds + positions.astype(np.uint64)) % np.uint64(len(self._token_ids))
        tokens: NDArray[np.int64] = self._token_ids[indices]
        return tokens

    def _prompts(self, schedule: SchedulerOutput) -> PromptResults:
        logprobs = hidden = None
        if (scored := schedule.scored) is not None:
            columns = self._logprobs(len(scored.token_ids), scored.num_top)
            logprobs = NullDownload(columns, self._idle_from)
        if (rows := schedule.embedded) is not None:
            same = np.ones((len(rows), _DIMENSIONS), dtype=np.float32)
            hidden = NullDownload([same], self._idle_from)
        return PromptResults(logprobs, hidden)

    def _logprobs(self, num_rows: int, num_top: int) -> list[NDArray[Any]]:
        shape = (num_rows, num_top)
        return [
            np.full(num_rows, -1.0, dtype=np.float32),
            np.ones(num_rows, dtype=np.int32),
            np.resize(self._token_ids, shape).astype(np.int32),
            np.full(shape, -1.0, dtype=np.float32),
        ]
