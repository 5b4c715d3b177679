"""Causal attention of a mixed prefill and decode step over the paged KV cache, one sequence at a
time, in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.sinks import check_sinks, softmax_with_sinks
from kernels.checks import FLOATS, check_dtype, check_like, check_shape

# Query chunk of a long prefill: bounds the mask's size and skips keys above the diagonal.
_TILE = 256


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a step: its queries, and the location of the keys they attend to.

    Attributes:
        query_start, query_end: its tokens in the step; they are the last ones of the sequence.
        num_keys: keys to read, including the last query's own key.
        block_ids: int64 block ids to gather; None if the keys are contiguous in the cache.
        first_row: row of the first key in the gathered blocks or, if contiguous, in the cache.
    """

    query_start: int
    query_end: int
    num_keys: int
    block_ids: Tensor | None
    first_row: int


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k) v for the queries of all `spans`; softmax in float32.

    Grouped-query attention: query head h reads KV head h // (H / Hkv), without repeating keys or
    values. Nothing is copied for a span that is contiguous in the cache.

    Args:
        query: float [T, H, D].
        key_cache, value_cache: [num_blocks, block_size, Hkv, D], of the dtype of `query`.
        spans: each starts at the first key that its first query attends to.
        scale: factor of the scores.
        sliding_window: with w, position p attends to p - w + 1 .. p; with None, to 0 .. p.
        soft_cap: with c, scores s become c * tanh(s / c).
        sinks: float32 [H]: a score of each head that takes part in the softmax, and has no value.

    Returns:
        [T, H, D]; undefined for tokens outside all spans.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device.
    """
    check_dtype("query", query, *FLOATS)
    check_shape("query", query, (None, None, None))
    check_shape("key_cache", key_cache, (None, None, None, query.shape[2]))
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    check_like("key_cache", key_cache, query)
    check_like("value_cache", value_cache, query)
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"query: its {query.shape[1]} heads must be a multiple of the cache's "
            f"{key_cache.shape[2]}"
        )
    check_sinks(query, sinks)
    out = torch.empty_like(query)
    for span in spans:
        tokens = slice(span.query_start, span.query_end)
        keys, values = _read(key_cache, span), _read(value_cache, span)
        _attend(query[tokens], keys, values, scale, sliding_window, soft_cap, sinks, out[tokens])
    return out


def _read(cache: Tensor, span: Span) -> Tensor:
    """Return the keys or values of a span, [Hkv, num_keys, D]."""
    blocks = cache if span.block_ids is None else cache.index_select(0, span.block_ids)
    rows = blocks.flatten(0, 1)[span.first_row : span.first_row + span.num_keys]
    return rows.transpose(0, 1)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Write the attention of one sequence's last tokens, [n, H, D], to `out`."""
    count, heads, dim = queries.shape
    kv_heads, num_keys, _ = keys.shape
    groups = (kv_heads, heads // kv_heads)
    if count == 1 and soft_cap is None and sinks is None:
        # Decode: the heads of a group are the rows of one product, and one query needs no mask.
        q = queries.view(1, *groups, dim)
        result = F.scaled_dot_product_attention(q, keys[None], values[None], scale=scale)
        out.view(1, *groups, dim).copy_(result)
        return
    for start in range(0, count, _TILE):
        end = min(start + _TILE, count)
        # Keys are counted from the first one read; query i's own key is num_keys - count + i.
        first, high = num_keys - count + start, num_keys - count + end
        low = 0 if window is None else max(0, first - window + 1)
        causal = first == 0 and (window is None or high <= window)
        q = queries[start:end].view(-1, *groups, dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
        k = keys[:, None, low:high].expand(*groups, -1, -1)
        v = values[:, None, low:high].expand(*groups, -1, -1)
        if soft_cap is None and sinks is None:
            mask = None if causal else _mask(first, low, high, window, queries.device)
            result = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale
            )
        else:
            scores = (q @ k.mT).float() * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            unseen = ~_mask(first, low, high, window, queries.device)
            columns = None if sinks is None else sinks.view(*groups, 1)
            weights = softmax_with_sinks(scores.masked_fill_(unseen, -math.inf), columns)
            result = weights.to(v.dtype) @ v
        out[start:end].view(-1, *groups, dim).copy_(result.permute(2, 0, 1, 3))


def _mask(first: int, low: int, high: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [high - first, high - low]: whether queries first..high see keys low..high."""
    query = torch.arange(first, high, device=device)[:, None]
    key = torch.arange(low, high, device=device)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
