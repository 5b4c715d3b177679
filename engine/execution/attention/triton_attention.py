"""Attention by our kernels in the Triton language: the GPU backend."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import UnsupportedError
from engine.layers.attention import AttentionInputs, StepAttention
from engine.models.batch import Batch
from kernels.attention.paged_cache import BLOCK_SIZES, MAX_GROUP
from kernels.attention.paged_decode import paged_decode_attention
from kernels.attention.paged_prefill import paged_prefill_attention
from kernels.attention.split_plan import SplitPlan, num_work_items, plan_splits


class TritonAttention:
    """An `AttentionBackend`: split-KV decode for rows of one token, tiled prefill for the rest."""

    def __init__(self, block_size: int) -> None:
        if block_size not in BLOCK_SIZES:
            raise UnsupportedError(
                f"must be 16, 32 or 64 on a GPU (got {block_size})", param="block_size"
            )

    def check(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, kv_cache_dtype: torch.dtype
    ) -> None:
        group = num_heads // num_kv_heads
        if head_dim % 16 or not 32 <= head_dim <= 256:
            raise UnsupportedError(
                f"must be a multiple of 16 from 32 to 256 on a GPU (got {head_dim})",
                param="config.json: head_dim",
            )
        if group > MAX_GROUP:
            raise UnsupportedError(
                f"at most {MAX_GROUP} query heads may share one KV head on a GPU (got {group})",
                param="config.json: num_key_value_heads",
            )

    def plan(self, batch: Batch) -> StepAttention:
        return TritonStepAttention(batch)


class TritonStepAttention:
    """A `StepAttention`; splits the sequences of the decode rows once per window size."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        if batch.num_decodes is None:
            # Both kernels get all rows, and each skips the other's: decode gets no keys for rows
            # of several tokens, prefill no tokens in rows of one. Prefill overwrites what decode
            # writes for the tokens of its rows.
            is_decode = batch.query_start_loc.diff() == 1
            num_decodes = is_decode.sum(dtype=torch.int32)
            self._decodes = self._prefills = slice(None, len(batch.seq_lens))
            self._prefill_tokens = slice(None)
            self._decode_lens = torch.where(is_decode, batch.seq_lens, 0)
            self._prefill_lens = batch.seq_lens
            self._query_start_loc = torch.maximum(batch.query_start_loc, num_decodes)
        else:
            self._decodes = slice(None, batch.num_decodes)
            self._prefills = self._prefill_tokens = slice(batch.num_decodes, None)
            self._decode_lens = batch.seq_lens[self._decodes]
            self._prefill_lens = batch.seq_lens[self._prefills]
            # Counted from the first of their tokens.
            self._query_start_loc = batch.query_start_loc[self._prefills] - batch.num_decodes
        self._plans: dict[int | None, SplitPlan] = {}

    def attend(self, inputs: AttentionInputs) -> Tensor:
        out = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
        block_tables = self._batch.group_tables(inputs.cache.group)
        if len(self._decode_lens):
            paged_decode_attention(
                inputs.query[self._decodes],
                inputs.cache.key,
                inputs.cache.value,
                block_tables[self._decodes],
                self._decode_lens,
                self._plan(inputs.sliding_window, inputs.cache.key.shape[2]),
                scale=inputs.scale,
                soft_cap=inputs.soft_cap,
                sinks=inputs.sinks,
                key_scale=inputs.key_scale,
                value_scale=inputs.value_scale,
                out=out[self._decodes],
            )
        if len(self._prefill_lens):
            paged_prefill_attention(
                inputs.query[self._prefill_tokens],
                inputs.cache.key,
                inputs.cache.value,
                block_tables[self._prefills],
                self._query_start_loc,
                self._prefill_lens,
                scale=inputs.scale,
                sliding_window=inputs.sliding_window,
                soft_cap=inputs.soft_cap,
                sinks=inputs.sinks,
                key_scale=inputs.key_scale,
                value_scale=inputs.value_scale,
                out=out[self._prefill_tokens],
            )
        return out

    def _plan(self, sliding_window: int | None, num_kv_heads: int) -> SplitPlan:
        plan = self._plans.get(sliding_window)
        if plan is None:
            items = num_work_items(len(self._decode_lens), num_kv_heads, self._decode_lens.device)
            plan = plan_splits(
                self._decode_lens, items, num_kv_heads, sliding_window=sliding_window
            )
            self._plans[sliding_window] = plan
        return plan
