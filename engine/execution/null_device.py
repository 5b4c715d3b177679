"""The null device, for benchmarks of the host: it makes tokens up, at a set time per step.

Scheduler, blocks, plan, one step ahead, outputs and stages are those of a GPU. No weights are read,
no KV cache is allocated, and masks, biases and penalties have no effect on the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.kv_cache_manager import blocks_for
from engine.core.schedule import Schedule
from engine.execution.device_defaults import ResolvedConfig
from engine.execution.model_runner import MAX_STOP_TOKEN_IDS
from engine.execution.pending_step import PendingStep
from engine.execution.sampling.logprobs import Logprobs
from engine.execution.sampling.sampler import Sampler, Samples
from engine.execution.step_plan import StepPlan, plan_step
from engine.models.model_config import ModelConfig
from kernels.slot_tables import SlotTables

_CPU = torch.device("cpu")
# Plans are those of a device with Triton's kernels; nothing is allocated on this one.
_META = torch.device("meta")


class NullSamples:
    """Made-up samples that are there at a `time.monotonic()` second."""

    def __init__(self, samples: Samples, ready_at: float) -> None:
        self._samples = samples
        self._ready_at = ready_at

    def wait(self) -> Samples:
        """Sleep until the step is over; return the samples."""
        wait_s = self._ready_at - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        return self._samples


class NullRunner:
    """Runs steps as `ModelRunner` does, one after the other, each in `step_s` seconds.

    A sequence's tokens depend on its seed and on their positions alone.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model_config: ModelConfig,
        token_ids: Sequence[int],
        *,
        max_model_len: int,
        step_s: float,
    ) -> None:
        """Make up tokens of `token_ids`, at least one."""
        self._token_ids = np.array(token_ids, dtype=np.int64)
        self._num_top_logprobs = min(config.max_logprobs, model_config.vocab_size)
        self._step_s = step_s
        self._idle_from = 0.0  # time.monotonic() second
        self._seeds = np.zeros(config.max_num_seqs, dtype=np.uint64)  # by slot
        self._sampler = Sampler(config.max_num_seqs, model_config.vocab_size, _META)
        self._tables = SlotTables.allocate(
            config.max_num_seqs,
            max_model_len=max_model_len,
            max_blocks=blocks_for(max_model_len, config.block_size),
            max_stop_token_ids=MAX_STOP_TOKEN_IDS,
            device=_CPU,
        )

    def launch(self, schedule: Schedule) -> PendingStep:
        """Launch a step with at least one row, behind earlier ones, without waiting for it."""
        plan = plan_step(schedule, self._tables, self._sampler)
        for row in schedule.rows:
            if row.first_changed_block is None:
                self._seeds[row.slot] = row.request.seed
        samples = self._run(schedule, plan)
        self._idle_from = max(self._idle_from, time.monotonic()) + self._step_s
        sent = None if samples is None else NullSamples(samples, self._idle_from)
        return PendingStep(schedule, plan, lambda: sent)

    def _run(self, schedule: Schedule, plan: StepPlan) -> Samples | None:
        """Upload what the step needs, and make up the token of each row that samples one."""
        plan.writes.apply()
        if plan.samples is None:
            return None
        plan.samples.arrays.upload(_CPU)
        num_sampled = len(plan.wants_token)
        rows = schedule.rows[:num_sampled]
        ends = [row.start + row.num_tokens - row.request.num_prompt_tokens for row in rows]
        token_ids = self._tokens(self._seeds[plan.slots[:num_sampled]], np.array(ends))
        logprobs = None
        if plan.samples.logprobs is not None:
            logprobs = self._logprobs(len(plan.samples.logprobs.rows))
        return Samples(torch.from_numpy(token_ids), logprobs)

    def _tokens(self, seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        places = (seeds + positions.astype(np.uint64)) % np.uint64(len(self._token_ids))
        tokens: NDArray[np.int64] = self._token_ids[places]
        return tokens

    def _logprobs(self, num_rows: int) -> Logprobs:
        shape = (num_rows, self._num_top_logprobs)
        return Logprobs(
            chosen=torch.full((num_rows,), -1.0),
            ranks=torch.ones(num_rows, dtype=torch.int64),
            top_token_ids=torch.from_numpy(np.resize(self._token_ids, shape)),
            top_logprobs=torch.full(shape, -1.0),
        )
