"""Attention on a GPU that is the same for a token whatever else is in its step, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.execution.attention.triton_attention import TritonAttention
from engine.layers.attention import LayerCache, StepAttention
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

    def attend(
        self,
        query: Tensor,
        cache: LayerCache,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> Tensor:
        return paged_prefill_attention(
            query,
            cache.key,
            cache.value,
            self.batch.group_tables(cache.group),
            self.batch.query_start_loc,
            self.batch.seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
            is_invariant=True,
        )
