"""Causal attention of a mixed prefill and decode step on the CPU, over KV blocks in place.

FlashAttention (Dao et al., 2022) over the block table; the query heads of a group share each read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.sinks import check_sinks
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_like,
    check_shape,
)
from kernels.cpu.library import operations


def attention_in_place(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    split_keys: bool = True,
) -> Tensor:
    """Return softmax(scale * q k) v for the last queries of each sequence; float32 arithmetic.

    Query head h reads KV head h // (H / Hkv). No KV is gathered or copied, and nothing past the end
    of a sequence is read. The kernels must have been built: see `operations`.

    Args:
        query: float [T, H, D].
        key_cache, value_cache: [num_blocks, block_size, Hkv, D], contiguous, of the dtype of
            `query`.
        query_start_loc: int32 [B + 1]: sequence i has tokens query_start_loc[i] to
            query_start_loc[i + 1] - 1 of the step, which are its last ones.
        seq_lens: int32 [B], number of keys of each sequence; 0 if idle.
        block_tables: int32 [B, max blocks], rows contiguous.
        scale: factor of the scores.
        sliding_window: with w, position p attends to p - w + 1 .. p; with None, to 0 .. p.
        soft_cap: with c, scores s, which are scaled, become c * tanh(s / c).
        sinks: float32 [H], contiguous: a score of each head that takes part in the softmax, and has
            no value.
        split_keys: whether the keys of few long sequences may be divided among threads. If not, a
            token's result depends, to the last bit, on its own query and keys alone: not on the
            other tokens of the step, on the threads or on the blocks.

    Returns:
        [T, H, D]; undefined for tokens of idle rows and of no sequence.

    Raises:
        ValueError: an argument has a wrong value, shape, dtype, stride or device.
    """
    check_dtype("query", query, *FLOATS)
    check_shape("query", query, (None, None, None))
    check_shape("key_cache", key_cache, (None, None, None, query.shape[2]))
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_like(name, cache, query)
        check_contiguous(name, cache)
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"query: its {query.shape[1]} heads must be a multiple of the cache's "
            f"{key_cache.shape[2]}"
        )
    for name, numbers in (
        ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens),
        ("block_tables", block_tables),
    ):
        check_dtype(name, numbers, torch.int32)
        check_device(name, numbers, query.device)
    check_shape("seq_lens", seq_lens, (query_start_loc.shape[0] - 1,))
    check_shape("block_tables", block_tables, (seq_lens.shape[0], None))
    check_contiguous("query_start_loc", query_start_loc)
    check_contiguous("seq_lens", seq_lens)
    if block_tables.stride(1) != 1 and block_tables.shape[1] > 1:
        raise ValueError("block_tables: its rows must be contiguous")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window: must be at least 1 (got {sliding_window})")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: must be positive (got {soft_cap})")
    check_sinks(query, sinks)
    fast = operations(query)
    assert fast is not None, "the CPU kernels are not there"
    out: Tensor = fast.paged_attention(
        query, key_cache, value_cache, query_start_loc, seq_lens, block_tables, scale,
        sliding_window, soft_cap, sinks, split_keys,
    )  # fmt: skip
    return out
