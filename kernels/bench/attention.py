"""Shared by the attention cases: a paged KV cache, and the same keys and values contiguously."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.bench.case import Model, randn
from kernels.paged_cache import FP8

_SCALES = (0.02, 0.015)  # scales of the keys and values of a float8 cache


@dataclass(frozen=True, slots=True)
class Paged:
    """Sequences in a paged KV cache.

    Attributes:
        lengths: tokens of each.
        key_cache, value_cache: [num_blocks, block_size, Hkv, D] of random numbers.
        block_tables: int32 [B, max_blocks], shuffled block ids; padded with 0.
        seq_lens: int32 [B].
        key_scale, value_scale: float32 [Hkv] of a float8 cache.
    """

    lengths: list[int]
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None

    @classmethod
    def random(
        cls,
        lengths: list[int],
        kv_heads: int,
        dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Paged:
        """Return sequences of `lengths` tokens."""
        counts = [-(-length // block_size) for length in lengths]
        generator = torch.Generator().manual_seed(0)
        ids = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, blocks in zip(tables, ids, strict=True):
            row[: len(blocks)] = blocks
        shape = (sum(counts) + 1, block_size, kv_heads, dim)
        caches = [randn(*shape, dtype=_wide(dtype), device=device, seed=seed) for seed in (0, 1)]
        scales: list[Tensor | None] = [None, None]
        if dtype == FP8:
            scales = [torch.full((kv_heads,), scale, device=device) for scale in _SCALES]
            caches = [
                cache.div_(scale).clamp_(-448, 448).to(FP8)
                for cache, scale in zip(caches, _SCALES, strict=True)
            ]
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        return cls(lengths, caches[0], caches[1], tables.to(device), seq_lens, scales[0], scales[1])

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values."""
        _, _, kv_heads, dim = self.key_cache.shape
        size = 2 * kv_heads * dim * self.key_cache.element_size()
        return sum(self.lengths) * size

    def contiguous(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, Hkv, max_length, D] in `dtype`; the padding is arbitrary."""
        found = []
        for cache, scale in (
            (self.key_cache, self.key_scale),
            (self.value_cache, self.value_scale),
        ):
            rows = gather(cache.view(torch.uint8) if scale is not None else cache, self)
            if scale is not None:
                rows = (rows.view(FP8).to(dtype) * scale[:, None, None]).to(dtype)
            found.append(rows.contiguous())
        return found[0], found[1]


def geometry(model: Model, block_size: int, cache_dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments that the cases of `model` share."""
    return {
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "dim": model.head_dim,
        "block_size": block_size,
        "dtype": torch.bfloat16,
        "cache_dtype": cache_dtype,
    }


def tiny_geometry(cache_dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments that differ for a tiny case, which the tests run."""
    return {
        "heads": 6,
        "kv_heads": 2,
        "dim": 64,
        # With a float8 cache the kernels compute in float16, whatever the queries' dtype.
        "dtype": torch.float16 if cache_dtype == FP8 else torch.float32,
        "cache_dtype": FP8 if cache_dtype == FP8 else torch.float32,
    }


def gather(cache: Tensor, paged: Paged) -> Tensor:
    """Return the rows of all sequences, [B, Hkv, max_length, D], read through the block tables."""
    tables = paged.block_tables
    rows: Tensor = cache.index_select(0, tables.flatten()).unflatten(0, tables.shape).flatten(1, 2)
    return rows[:, : max(paged.lengths)].transpose(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == FP8 else dtype
