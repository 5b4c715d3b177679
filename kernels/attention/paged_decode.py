"""Paged decode attention: one query per sequence over the paged KV cache.

Split-KV with an online softmax (Dao et al., "Flash-Decoding", 2023; Milakov and Gimelshein, 2018).
One program computes all query heads of one KV head for one work item of a `SplitPlan`, a range of
keys of one sequence, so that each key and value is read once. The last program of a sequence to
finish merges the partial results of its splits, so one launch is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dependent_launch, device
from kernels.attention.paged_cache import (
    BLOCK_SIZES,
    FP8,
    MAX_GROUP,
    check_caches,
    check_query,
    check_scale,
)
from kernels.attention.paged_decode_kernel import decode_kernel, settings
from kernels.attention.sinks import check_sinks, softmax_with_sinks
from kernels.attention.split_plan import FAN_IN, SplitPlan
from kernels.checks import check_device, check_dtype, check_last_stride, check_shape


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    plan: SplitPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k) v for the last token of each sequence, softmax in float32.

    Query head h reads KV head h // (H / Hkv). With an fp8 cache both products are in float16,
    which represents fp8 values exactly; queries are clamped to +-65504.

    Args:
        query: float [B, H, D]; the last dimension is contiguous.
        key_cache, value_cache: [num_blocks, block_size, Hkv, D], contiguous, block_size 16, 32 or
            64; of the dtype of `query`, or float8_e4m3fn. It already holds the last token's key.
        block_tables: int32 [B, max_blocks], block ids of each sequence in order; entries whose keys
            are not read may be anything. The last dimension is contiguous.
        seq_lens: int32 [B], keys of each sequence; 0 for a padding row.
        plan: from `plan_splits` for these `seq_lens`; it also carries the sliding window.
        scale: factor of the scores.
        soft_cap: with c, scores s become c * tanh(s / c).
        sinks: float32 [H], contiguous: a score of each head that takes part in the softmax, and has
            no value (Xiao et al., 2023).
        key_scale, value_scale: float32 [Hkv], scales of an fp8 cache's keys and values.
        out: where to write the result, like `query`; its last dimension is contiguous.

    Returns:
        [B, H, D] in the dtype of `query`, `out` if given; zeros in padding rows.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    check_query(query, out)
    _check_cache(query, key_cache, value_cache, key_scale, value_scale)
    _check_tables(query, key_cache, block_tables, seq_lens, plan)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: must be positive (got {soft_cap})")
    check_sinks(query, sinks)
    if not device.runs_triton(query):
        return out.copy_(
            reference(
                query,
                key_cache,
                value_cache,
                block_tables,
                seq_lens,
                plan.sliding_window,
                scale=scale,
                soft_cap=soft_cap,
                sinks=sinks,
                key_scale=key_scale,
                value_scale=value_scale,
            )
        )
    if query.numel():
        _launch(
            query,
            key_cache,
            value_cache,
            block_tables,
            plan,
            scale,
            soft_cap,
            sinks,
            key_scale,
            value_scale,
            out,
        )
    return out


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    sliding_window: int | None,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Return the attention in float32, one sequence at a time; reads lengths on the host."""
    num_kv_heads, block_size = key_cache.shape[2], key_cache.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for row, length in enumerate(seq_lens.tolist()):
        if not length:
            continue
        start = 0 if sliding_window is None else max(0, length - sliding_window)
        position = torch.arange(start, length, device=query.device)
        blocks = block_tables[row, position // block_size].long()
        slots = blocks, position % block_size
        keys = _widen(key_cache[slots], key_scale)  # [length - start, Hkv, D]
        values = _widen(value_cache[slots], value_scale)
        q = query[row].float().unflatten(0, (num_kv_heads, -1))
        scores = torch.einsum("hgd,khd->hgk", q, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = softmax_with_sinks(
            scores, None if sinks is None else sinks.view(num_kv_heads, -1)
        )
        out[row] = torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1)
    return out


def _widen(stored: Tensor, scale: Tensor | None) -> Tensor:
    return stored.float() if scale is None else stored.float() * scale[:, None]


def _launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    plan: SplitPlan,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    out: Tensor,
) -> None:
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_items = len(plan.work_items)
    group = num_heads // num_kv_heads
    limits = device.limits(query.device)
    tiles = settings(group, head_dim, key_cache.itemsize, limits.shared_memory)
    if key_cache.dtype == FP8:
        key_cache, value_cache = key_cache.view(torch.uint16), value_cache.view(torch.uint16)
    partial = torch.empty(num_items, num_heads, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(num_items, num_heads, dtype=torch.float32, device=query.device)
    decode_kernel[(num_kv_heads, num_items)](
        query_ptr=query,
        key_ptr=key_cache,
        value_ptr=value_cache,
        table_ptr=block_tables,
        work_items_ptr=plan.work_items,
        arrivals_ptr=plan.arrivals,
        key_scale_ptr=key_scale,
        value_scale_ptr=value_scale,
        sink_ptr=sinks,
        partial_ptr=partial,
        lse_ptr=lse,
        out_ptr=out,
        query_row_stride=query.stride(0),
        query_head_stride=query.stride(1),
        table_stride=block_tables.stride(0),
        block_stride=key_cache.stride(0),
        key_stride=key_cache.stride(1),
        arrivals_stride=plan.arrivals.stride(0),
        out_row_stride=out.stride(0),
        out_head_stride=out.stride(1),
        scale=scale,
        soft_cap=soft_cap,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        CONVERTS=device.converts_fp8(query.device),
        FAN_IN=FAN_IN,
        **tiles,
        **dependent_launch.options(query.device),
    )


def _check_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    check_caches(key_cache, value_cache, query, None)
    heads, (block_size, kv_heads) = query.shape[1], key_cache.shape[1:3]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"key_cache: must have blocks of {BLOCK_SIZES} tokens (got {block_size})")
    if heads % kv_heads or heads // kv_heads not in range(1, MAX_GROUP + 1):
        raise ValueError(
            f"query: its {heads} heads must be 1 to {MAX_GROUP} times the cache's {kv_heads}"
        )
    for name, scales in (("key_scale", key_scale), ("value_scale", value_scale)):
        if (scales is None) == (key_cache.dtype == FP8):
            raise ValueError(f"{name}: must be given with a float8_e4m3fn cache, and only then")
        if scales is not None:
            check_scale(name, scales, key_cache)


def _check_tables(
    query: Tensor, key_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, plan: SplitPlan
) -> None:
    for name, table, shape in (
        ("block_tables", block_tables, (len(query), None)),
        ("seq_lens", seq_lens, (len(query),)),
    ):
        check_dtype(name, table, torch.int32)
        check_shape(name, table, shape)
        check_device(name, table, query.device)
        check_last_stride(name, table)
    if plan.num_sequences != len(query):
        raise ValueError(
            f"plan: must be of {len(query)} sequences, as query (got {plan.num_sequences})"
        )
    check_device("plan", plan.work_items, query.device)
    if plan.arrivals.shape[1] < key_cache.shape[2]:
        raise ValueError(
            f"plan: must be for the cache's {key_cache.shape[2]} KV heads or more "
            f"(got {plan.arrivals.shape[1]})"
        )
    if seq_lens.device.type == "cpu" and seq_lens.numel():
        room = block_tables.shape[1] * key_cache.shape[1]
        longest = int(seq_lens.max())
        if longest > room:
            raise ValueError(f"block_tables: have room for {room} keys (got {longest} in seq_lens)")
