"""Attention through our kernels in the Triton language: the GPU backend."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import UnsupportedError
from engine.execution.attention import LayerCache
from engine.execution.batch import Batch
from engine.models.config import ModelConfig
from kernels.paged_decode import paged_decode_attention
from kernels.paged_prefill import paged_prefill_attention
from kernels.split_plan import SplitPlan, num_work_items, plan_splits

_BLOCK_SIZES = (16, 32, 64)
_MAX_GROUP = 16


class TritonAttention:
    """An `AttentionBackend`: split-KV decode for rows of one token, tiled prefill for the rest."""

    def __init__(self, block_size: int) -> None:
        if block_size not in _BLOCK_SIZES:
            raise UnsupportedError(f"block_size: must be 16, 32 or 64 on a GPU (got {block_size})")

    def check(self, config: ModelConfig) -> None:
        dim, group = config.head_dim, config.num_heads // config.num_kv_heads
        if dim % 16 or not 32 <= dim <= 256:
            raise UnsupportedError(
                "config.json: head_dim: must be a multiple of 16 from 32 to 256 on a GPU "
                f"(got {dim})"
            )
        if group > _MAX_GROUP:
            raise UnsupportedError(
                f"config.json: num_key_value_heads: at most {_MAX_GROUP} query heads can share one "
                f"on a GPU (got {group})"
            )

    def plan(self, batch: Batch) -> TritonStepAttention:
        num_decodes = int((batch.query_start_loc.diff() == 1).sum())
        return TritonStepAttention(batch, num_decodes, batch.slot_mapping.device)


class TritonStepAttention:
    """A `StepAttention`; splits the sequences of the decode rows once per window size."""

    def __init__(self, batch: Batch, num_decodes: int, device: torch.device) -> None:
        self._num_decodes = num_decodes
        self._num_prefills = len(batch.seq_lens) - num_decodes
        self._seq_lens = batch.seq_lens.to(device, non_blocking=True)
        self._block_tables = batch.block_tables.to(device, non_blocking=True)
        # Of the prefill rows, counted from the first of their tokens.
        query_start_loc = batch.query_start_loc[num_decodes:] - num_decodes
        self._query_start_loc = query_start_loc.to(device, non_blocking=True)
        self._plans: dict[int | None, SplitPlan] = {}

    def attend(
        self, query: Tensor, cache: LayerCache, *, scale: float, sliding_window: int | None
    ) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        decodes, prefills = slice(None, self._num_decodes), slice(self._num_decodes, None)
        if self._num_decodes:
            paged_decode_attention(
                query[decodes],
                cache.key,
                cache.value,
                self._block_tables[decodes],
                self._seq_lens[decodes],
                self._plan(sliding_window, cache.key.shape[2]),
                scale=scale,
                out=out[decodes],
            )
        if self._num_prefills:
            paged_prefill_attention(
                query[prefills],
                cache.key,
                cache.value,
                self._block_tables[prefills],
                self._query_start_loc,
                self._seq_lens[prefills],
                scale=scale,
                sliding_window=sliding_window,
                out=out[prefills],
            )
        return out

    def _plan(self, sliding_window: int | None, num_kv_heads: int) -> SplitPlan:
        plan = self._plans.get(sliding_window)
        if plan is None:
            seq_lens = self._seq_lens[: self._num_decodes]
            items = num_work_items(self._num_decodes, num_kv_heads, seq_lens.device)
            plan = plan_splits(seq_lens, items, num_kv_heads, sliding_window=sliding_window)
            self._plans[sliding_window] = plan
        return plan
