"""Attention by our C++ kernels: the CPU backend where they have been built."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.execution.attention.torch_attention import TorchAttention
from engine.layers.attention import AttentionInputs, StepAttention
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

    def attend(self, inputs: AttentionInputs) -> Tensor:
        assert inputs.key_scale is inputs.value_scale is None, "`check` refuses float8 caches"
        return attention_in_place(
            inputs.query,
            inputs.cache.key,
            inputs.cache.value,
            self.batch.query_start_loc,
            self.batch.seq_lens,
            self.batch.group_tables(inputs.cache.group),
            scale=inputs.scale,
            sliding_window=inputs.sliding_window,
            soft_cap=inputs.soft_cap,
            sinks=inputs.sinks,
            split_keys=self.split_keys,
        )
