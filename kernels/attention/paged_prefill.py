"""Paged prefill attention: causal attention of prompt chunks over the paged KV cache.

FlashAttention-2 (Dao, 2023) over paged keys and values, for chunks of any lengths in one launch.
The rows of a tile are the tokens of a chunk times the query heads that share a KV head: a short
chunk with grouped-query attention still fills a tile, and a key is read once for all heads of its
group. One program computes one tile of one KV head. It finds its sequence on the device, so that
the grid depends on shapes only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import device
from kernels.attention.paged_cache import BLOCK_SIZES, FP8, check_caches, check_query, check_scale
from kernels.attention.paged_prefill_kernel import prefill_kernel
from kernels.attention.paged_prefill_tiles import settings
from kernels.attention.sinks import check_sinks, softmax_with_sinks
from kernels.checks import (
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)


def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    is_invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k) v of the last tokens of each sequence; softmax in float32.

    The cache already holds the keys and values of these tokens. Query head h reads KV head
    h // (H / Hkv). With an fp8 cache the products are in float16 (float32 for float32 queries).

    Args:
        query: float [T, H, D], one sequence after another; D is contiguous, a multiple of 16 from
            32 to 256.
        key_cache, value_cache: [num_blocks, block_size, Hkv, D], contiguous, of the dtype of
            `query` or float8_e4m3fn; blocks of 16, 32 or 64.
        block_tables: int32 [B, max_blocks], rows contiguous: a column for every key of the longest
            sequence. Entries of keys that have left the sliding window may be anything.
        query_start_loc: int32 [B + 1], contiguous: sequence i owns the tokens from its entry to the
            next, possibly none. Nothing is written for tokens before the first entry and after the
            last.
        seq_lens: int32 [B], contiguous: tokens of each sequence including those of this step.
        scale: positive factor of the scores.
        sliding_window: with w, position p attends to p - w + 1 .. p; with None, to 0 .. p.
        soft_cap: with c, scores s become c * tanh(s / c).
        sinks: float32 [H], contiguous: a score of each head that takes part in the softmax, and has
            no value.
        key_scale, value_scale: float32 [Hkv], positive, with fp8 caches only: key = stored * scale.
        is_invariant: have a token's result depend, to the last bit, on its own query and keys
            alone: not on its chunk, nor on the other sequences.
        out: where to write the result, like `query` except for strides; a new tensor by default.

    Returns:
        [T, H, D] in the dtype of `query`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride, device or value, or is missing.
    """
    check_query(query, out)
    _check_caches(query, key_cache, value_cache, key_scale, value_scale)
    _check_sequences(query, block_tables, query_start_loc, seq_lens)
    _check_numbers(scale, sliding_window, soft_cap)
    check_sinks(query, sinks)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not device.runs_triton(query):
        tokens = slice(int(query_start_loc[0]), int(query_start_loc[-1]))
        out[tokens] = reference(
            query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale=scale,
            sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks,
            key_scale=key_scale, value_scale=value_scale,
        )[tokens]  # fmt: skip
    elif query.numel() and len(seq_lens):
        _launch(
            query, key_cache, value_cache, block_tables, query_start_loc, seq_lens,
            scale, sliding_window, soft_cap, sinks, key_scale, value_scale, is_invariant, out,
        )  # fmt: skip
    return out


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Return the attention computed in float32 throughout; zeros for tokens of no sequence."""
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for i, length in enumerate(lengths):
        tokens = slice(starts[i], starts[i + 1])
        first = length - (starts[i + 1] - starts[i])
        low = 0 if sliding_window is None else max(0, first - sliding_window + 1)
        keys = _gather(key_cache, block_tables[i], low, length, key_scale)
        values = _gather(value_cache, block_tables[i], low, length, value_scale)
        key = torch.arange(low, length, device=query.device)
        position = torch.arange(first, length, device=query.device)[:, None]
        seen = key <= position
        if sliding_window is not None:
            seen &= key > position - sliding_window
        q = query[tokens].float().unflatten(1, (keys.shape[1], -1))  # [n, Hkv, G, D]
        scores = torch.einsum("nhgd,khd->hgnk", q, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, float("-inf"))
        columns = None if sinks is None else sinks.view(*q.shape[1:3], 1)
        weights = softmax_with_sinks(scores, columns)
        out[tokens] = torch.einsum("hgnk,khd->nhgd", weights, values).flatten(1, 2)
    return out


def _gather(cache: Tensor, table: Tensor, low: int, high: int, scale: Tensor | None) -> Tensor:
    """Return the keys or values of positions `low` to `high`, float32 [high - low, Hkv, D]."""
    positions = torch.arange(low, high, device=cache.device)
    size = cache.shape[1]
    rows = cache[table[positions // size].long(), positions % size].float()
    return rows if scale is None else rows * scale[:, None]


def _launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    is_invariant: bool,
    out: Tensor,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    limits = device.limits(query.device)
    tiles = settings(
        num_tokens * group, len(seq_lens), num_kv_heads, head_dim,
        query.dtype, key_cache.dtype, limits, is_fixed=is_invariant,
    )  # fmt: skip
    if key_cache.dtype == FP8 and limits.capability < (8, 9):
        key_cache, value_cache = key_cache.view(torch.int8), value_cache.view(torch.int8)
    num_tiles = num_tokens * group // tiles["BLOCK_M"] + len(seq_lens)
    prefill_kernel[(num_tiles * num_kv_heads,)](
        query_ptr=query,
        key_ptr=key_cache,
        value_ptr=value_cache,
        table_ptr=block_tables,
        start_ptr=query_start_loc,
        seq_lens_ptr=seq_lens,
        key_scale_ptr=key_scale,
        value_scale_ptr=value_scale,
        sink_ptr=sinks,
        out_ptr=out,
        query_stride=query.stride(0),
        query_head_stride=query.stride(1),
        out_stride=out.stride(0),
        out_head_stride=out.stride(1),
        table_stride=block_tables.stride(0),
        num_sequences=len(seq_lens),
        window=sliding_window,
        scale=scale,
        soft_cap=soft_cap,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        # A token's tile may be masked for the sake of others, which is another loop: it must not
        # fuse other operations.
        enable_fp_fusion=not is_invariant,
        **tiles,
    )


def _check_caches(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    check_caches(key_cache, value_cache, query, None)
    _, block_size, num_kv_heads, _ = key_cache.shape
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"key_cache: blocks must be of {BLOCK_SIZES} keys (got {block_size})")
    if not num_kv_heads or query.shape[1] % num_kv_heads:
        raise ValueError(
            f"query: its {query.shape[1]} heads must be a multiple of the cache's {num_kv_heads}"
        )
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if (scale is not None) != (key_cache.dtype == FP8):
            raise ValueError(f"{name}: goes with fp8 caches, and only with them")
        if scale is not None:
            check_scale(name, scale, key_cache)


def _check_sequences(
    query: Tensor, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> None:
    check_shape("seq_lens", seq_lens, (None,))
    check_shape("query_start_loc", query_start_loc, (len(seq_lens) + 1,))
    check_shape("block_tables", block_tables, (len(seq_lens), None))
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens),
    ):
        check_dtype(name, tensor, torch.int32)
        check_device(name, tensor, query.device)
    check_last_stride("block_tables", block_tables)
    check_contiguous("query_start_loc", query_start_loc)
    check_contiguous("seq_lens", seq_lens)


def _check_numbers(scale: float, sliding_window: int | None, soft_cap: float | None) -> None:
    for name, number in (
        ("scale", scale),
        ("sliding_window", sliding_window),
        ("soft_cap", soft_cap),
    ):
        if number is not None and number <= 0:
            raise ValueError(f"{name}: must be positive (got {number})")
