"""Arguments of the rotary embedding, and expected contents of the cache."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kernels.attention.paged_cache import FP8
from kernels.rotary import reference
from tests.kernels.support import DEVICE, assert_close, padded, randn

BLOCK_SIZE = 16
Shape = tuple[int, int, int, int, int]  # tokens, query heads, KV heads, head dim, rotary dim
SHAPES: list[Shape] = [
    (1, 1, 1, 2, 2),
    (5, 6, 2, 10, 10),
    (3, 8, 1, 80, 32),
    (2, 9, 3, 96, 96),
    (1, 40, 8, 128, 128),
    (35, 14, 2, 64, 16),
    (4, 4, 4, 100, 60),
    (2, 7, 1, 256, 64),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_convention = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])


def arguments(
    shape: Shape = (5, 6, 2, 10, 10),
    dtype: torch.dtype = torch.float32,
    *,
    cache_dtype: torch.dtype | None = None,
    norms: bool = False,
    scaled: bool = False,
) -> dict[str, Any]:
    """Return arguments that map token i to slot 3 i + 1, with caches filled with sevens."""
    tokens, heads, kv_heads, dim, rotary = shape
    fused = padded(randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype) * 2)
    parts = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    angles = randn(tokens, rotary // 2, seed=1) * 3
    cache = torch.full(
        (tokens * 3 // BLOCK_SIZE + 2, BLOCK_SIZE, kv_heads, dim), 7.0, dtype=dtype, device=DEVICE
    ).to(cache_dtype or dtype)
    found: dict[str, Any] = {
        name: part.unflatten(-1, (-1, dim))
        for name, part in zip(("query", "key", "value"), parts, strict=True)
    }
    found |= {
        "cos": angles.cos(),
        "sin": angles.sin(),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "slot_mapping": torch.arange(tokens, device=DEVICE).flip(0) * 3 + 1,
    }
    if cache_dtype == FP8:
        # The first saturates some values.
        found["key_scale"] = torch.linspace(0.003, 0.02, kv_heads, device=DEVICE)
        found["value_scale"] = torch.linspace(0.002, 0.5, kv_heads, device=DEVICE)
    if norms:
        found["query_norm"] = randn(dim, dtype=dtype, seed=3)
        found["key_norm"] = randn(dim, dtype=dtype, seed=4)
        found["norm_eps"] = 1e-3
    if scaled:
        found["query_scale"] = torch.linspace(1.0, 1.7, tokens, device=DEVICE)
    return found


def turned(
    given: dict[str, Any], name: Literal["query", "key"], interleaved: bool = False
) -> Tensor:
    """Return the reference's result for the queries or keys among the arguments."""
    return reference(
        given[name],
        given["cos"],
        given["sin"],
        norm=given.get(f"{name}_norm"),
        norm_eps=given.get("norm_eps", 0.0),
        interleaved=interleaved,
        scale=given.get("query_scale") if name == "query" else None,
    )


def stored(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the cache's contents at the slots; not every device can index float8."""
    rows = cache.flatten(0, 1)
    return rows.view(torch.uint8)[slots].view(FP8) if cache.dtype == FP8 else rows[slots]


def check_slots(
    cache: Tensor, slots: Tensor, expected: Tensor, tolerance: float | None = None
) -> None:
    """Assert that the slots have the expected values, and that all other slots are unchanged."""
    assert_close(stored(cache, slots), expected, tolerance)
    others = torch.ones(cache.shape[0] * cache.shape[1], dtype=torch.bool, device=DEVICE)
    others[slots] = False
    assert (stored(cache, others).float() == 7).all()
