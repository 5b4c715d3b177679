"""Attention by torch's kernels: the backend for devices without our own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import UnsupportedError
from engine.layers.attention import AttentionInputs, StepAttention
from engine.models.batch import Batch
from kernels.attention.paged_attention import Span, paged_attention


class TorchAttention:
    """An `AttentionBackend` for every device that torch's scaled_dot_product_attention serves."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def check(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, kv_cache_dtype: torch.dtype
    ) -> None:
        """Accept heads of any shape, but no float8 cache."""
        if kv_cache_dtype == torch.float8_e4m3fn:
            raise UnsupportedError("fp8 is for GPUs only; set it to auto", param="kv_cache_dtype")

    def plan(self, batch: Batch) -> StepAttention:
        starts: list[int] = batch.query_start_loc.tolist()
        lengths: list[int] = batch.seq_lens.tolist()
        tables = [batch.group_tables(group) for group in range(batch.num_groups)]
        sequences = [
            _Sequence(
                starts[i], starts[i + 1], length, [self._blocks(each[i], length) for each in tables]
            )
            for i, length in enumerate(lengths)
            if length
        ]
        return TorchStepAttention(sequences, self._block_size, batch.slot_mapping.device)

    def _blocks(self, table: Tensor, length: int) -> list[int]:
        blocks: list[int] = table[: -(-length // self._block_size)].tolist()
        return blocks


@dataclass(frozen=True, slots=True)
class _Sequence:
    query_start: int
    query_end: int
    length: int
    blocks: list[list[int]]  # of each group of layers


class TorchStepAttention:
    """A `StepAttention`: finds the blocks of each sequence's keys once per group and window."""

    def __init__(self, sequences: list[_Sequence], block_size: int, device: torch.device) -> None:
        self._sequences = sequences
        self._block_size = block_size
        self._device = device
        self._spans: dict[tuple[int, int | None], list[Span]] = {}

    def attend(self, inputs: AttentionInputs) -> Tensor:
        assert inputs.key_scale is inputs.value_scale is None, "`check` refuses float8 caches"
        key = inputs.cache.group, inputs.sliding_window
        spans = self._spans.get(key)
        if spans is None:
            spans = [self._span(sequence, *key) for sequence in self._sequences]
            self._spans[key] = spans
        return paged_attention(
            inputs.query,
            inputs.cache.key,
            inputs.cache.value,
            spans,
            scale=inputs.scale,
            sliding_window=inputs.sliding_window,
            soft_cap=inputs.soft_cap,
            sinks=inputs.sinks,
        )

    def _span(self, sequence: _Sequence, group: int, window: int | None) -> Span:
        """Find the blocks that a sequence's queries attend to, and whether they are contiguous."""
        size = self._block_size
        first_query = sequence.length - (sequence.query_end - sequence.query_start)
        kv_start = 0 if window is None else max(0, first_query - window + 1)
        blocks = sequence.blocks[group][kv_start // size : -(-sequence.length // size)]
        offset = kv_start % size
        in_one_run = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        return Span(
            query_start=sequence.query_start,
            query_end=sequence.query_end,
            num_keys=sequence.length - kv_start,
            block_ids=None if in_one_run else torch.tensor(blocks, device=self._device),
            first_row=blocks[0] * size + offset if in_one_run else offset,
        )
