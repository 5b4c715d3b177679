"""Attention by our C++ kernels: the CPU backend where they have been built."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.execution.attention.torch_attention import TorchAttention
from engine.layers.attention import LayerCache, StepAttention
from engine.models.batch import Batch
from kernels.cpu.attention import attention_in_place


class CpuAttention(TorchAttention):
    """An `AttentionBackend` that accepts what torch's does, and never copies the cache."""

    def plan(self, batch: Batch) -> StepAttention:
        return CpuStepAttention(batch)


class InvariantCpuAttention(CpuAttention):
    """The same for a token whatever else is in its step, to the last bit."""

    def plan(self, batch: Batch) -> StepAttention:
        return CpuStepAttention(batch, split_keys=False)


@dataclass(frozen=True, slots=True)
class CpuStepAttention:
    """A `StepAttention` without a plan: the kernel reads the batch's block tables."""

    batch: Batch
    split_keys: bool = True

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
        assert key_scale is value_scale is None, "float8 caches are refused by `check`"
        return attention_in_place(
            query,
            cache.key,
            cache.value,
            self.batch.query_start_loc,
            self.batch.seq_lens,
            self.batch.group_tables(cache.group),
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            split_keys=self.split_keys,
        )
