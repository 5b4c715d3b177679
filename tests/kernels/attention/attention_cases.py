"""Paged KV caches in which everything that attention must not read is NaN, and a dense oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.support import DEVICE, randn

FP8 = torch.float8_e4m3fn
_allocate = torch.empty  # before it is patched: poisoning gigabytes takes too long


@dataclass(frozen=True, slots=True)
class PagedCase:
    """Sequences in a paged KV cache, and the same keys and values in dense tensors.

    Attributes:
        key_cache, value_cache: [num_blocks, block_size, Hkv, D]; NaN wherever no key may be read:
            null block, unused blocks, slots past the end and before the first visible key.
        block_tables: int32 [B, max_blocks]; the null block in unused entries.
        seq_lens: int32 [B].
        key_scale, value_scale: float32 [Hkv] of an fp8 cache, else None.
        keys, values: float32 [length, Hkv, D] of each sequence, as rounded by the cache's dtype;
            NaN before the first key.
    """

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None
    keys: list[Tensor]
    values: list[Tensor]


def paged_case(
    lengths: Sequence[int],
    *,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    first_keys: Sequence[int] | None = None,
    spare_columns: int = 1,
    lowest_block: int = 1,
    seed: int = 0,
) -> PagedCase:
    """Return sequences of `lengths` keys in shuffled blocks.

    Args:
        lengths: keys of each sequence; 0 for a padding row.
        kv_heads, head_dim, block_size: of the cache.
        dtype: of the cache; float8_e4m3fn comes with scales.
        first_keys: first visible key of each sequence, 0 by default; earlier blocks are the null
            block in the table, as if they had left a sliding window.
        spare_columns: extra columns of the block table.
        lowest_block: only blocks from here on are used; memory below is not touched.
        seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    spare_blocks = 2
    ids = torch.randperm(sum(counts) + spare_blocks, generator=generator) + lowest_block
    tables = torch.zeros(len(lengths), max(counts, default=0) + spare_columns, dtype=torch.int32)
    shape = (lowest_block + len(ids), block_size, kv_heads, head_dim)
    fills = []
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        first = first_keys[i] if first_keys else 0
        blocks, ids = ids[:count], ids[count:]
        tables[i, first // block_size : count] = blocks[first // block_size :].int()
        positions = torch.arange(first, length)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        fills.append((length, first, slots.to(DEVICE)))
    key_cache, key_scale, keys = _fill(shape, lowest_block, dtype, fills, seed + 1)
    value_cache, value_scale, values = _fill(shape, lowest_block, dtype, fills, seed + 2)
    return PagedCase(
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=tables.to(DEVICE),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        key_scale=key_scale,
        value_scale=value_scale,
        keys=keys,
        values=values,
    )


def _fill(
    shape: tuple[int, int, int, int],
    lowest_block: int,
    dtype: torch.dtype,
    fills: list[tuple[int, int, Tensor]],
    seed: int,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Return a cache with its scales, and the rows of every sequence in float32."""
    _, _, heads, dim = shape
    cache = _allocate(shape, dtype=dtype, device=DEVICE)
    for poisoned in (cache[:1], cache[lowest_block:]):
        poisoned.copy_(torch.full(poisoned.shape, float("nan")))
    # Of keys and values, and of the heads, a different one each.
    scale = None if dtype != FP8 else (torch.arange(heads, device=DEVICE) + 1.5 + seed % 2) / 64
    rows = cache.flatten(0, 1)
    dense = []
    for i, (length, first, slots) in enumerate(fills):
        stored = randn(length - first, heads, dim, seed=1000 * seed + i)
        if scale is not None:
            stored = (stored / scale[:, None]).clamp(-448, 448)
        stored = stored.to(dtype)
        # Copied as bytes: torch cannot scatter fp8.
        rows.view(torch.uint8)[slots] = stored.view(torch.uint8)
        wide = stored.float() if scale is None else stored.float() * scale[:, None]
        dense.append(torch.cat([torch.full((first, heads, dim), float("nan")).to(wide), wide]))
    return cache, scale, dense


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of the last tokens of one sequence, in float64.

    Args:
        query: [n, H, D], of the last n of the tokens that have keys.
        keys, values: [length, Hkv, D]; rows that no query attends to may be NaN.
        scale, sliding_window, soft_cap, sinks: as in the kernels.

    Returns:
        float64 [n, H, D].
    """
    length, group = len(keys), query.shape[1] // keys.shape[1]
    position = torch.arange(length - len(query), length, device=query.device)[:, None]
    key = torch.arange(length, device=query.device)
    seen = key <= position
    if sliding_window is not None:
        seen &= key > position - sliding_window
    k = keys.double().nan_to_num().repeat_interleave(group, dim=1)
    v = values.double().nan_to_num().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v)
