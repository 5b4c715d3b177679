"""Batch-invariant attention on a GPU: a token's result is the same whatever else is in its step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.execution.attention.triton_attention import TritonAttention
from engine.layers.attention import AttentionInputs, StepAttention
from engine.models.batch import Batch
from kernels.attention.paged_prefill import paged_prefill_attention


class InvariantAttention(TritonAttention):
    """An `AttentionBackend` that accepts what `TritonAttention` does, for the deterministic mode.

    The kernel of prefill computes every row, also those of one token, with tiles of one size: two
    kernels, or a split of long sequences that depends on the batch, would round differently.
    """

    def plan(self, batch: Batch) -> StepAttention:
        return InvariantStepAttention(batch)


@dataclass(frozen=True, slots=True)
class InvariantStepAttention:
    """A `StepAttention` without a plan: the kernel reads the batch's lengths."""

    batch: Batch

    def attend(self, inputs: AttentionInputs) -> Tensor:
        return paged_prefill_attention(
            inputs.query,
            inputs.cache.key,
            inputs.cache.value,
            self.batch.group_tables(inputs.cache.group),
            self.batch.query_start_loc,
            self.batch.seq_lens,
            scale=inputs.scale,
            sliding_window=inputs.sliding_window,
            soft_cap=inputs.soft_cap,
            sinks=inputs.sinks,
            key_scale=inputs.key_scale,
            value_scale=inputs.value_scale,
            is_invariant=True,
        )
