"""Rotary embedding with the KV cache write, next to eager torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.bench.case import MODELS, Work, by_tokens, numel_bytes, randn
from kernels.paged_cache import FP8
from kernels.rotary import rotary_and_cache

_BLOCK_SIZE = 16


def _rotary(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    float8: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Work:
    # Views of one fused projection, as in the model.
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    fused = randn(tokens, sum(sizes), dtype=dtype, device=device).split(sizes, dim=-1)
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in fused)
    angles = randn(tokens, dim // 2, dtype=torch.float32, device=device, seed=1)
    blocks = -(-tokens // _BLOCK_SIZE) + 1
    shape = (2, blocks, _BLOCK_SIZE, kv_heads, dim)
    caches = torch.zeros(shape, dtype=FP8 if float8 else dtype, device=device).unbind()
    key_cache, value_cache = caches
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)).to(device) + 1
    place = torch.arange(tokens, device=device)
    slots = order[place // _BLOCK_SIZE] * _BLOCK_SIZE + place % _BLOCK_SIZE
    scales = torch.full((2, kv_heads), 0.02, device=device).unbind() if float8 else (None, None)
    arguments = (query, key, value, angles.cos(), angles.sin(), key_cache, value_cache, slots)
    form = partial(_torch, *arguments, scales)
    written = numel_bytes(query) + 2 * key.numel() * caches[0].element_size()
    return Work(
        ours=partial(rotary_and_cache, *arguments, key_scale=scales[0], value_scale=scales[1]),
        peers={"eager": form},
        compiled=form,
        bytes=numel_bytes(query, key, value, angles, angles, slots) + written,
        written=caches,
    )


def _torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    scales: tuple[Tensor | None, ...],
) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    caches, rows = (key_cache, value_cache), (rotate(key), value.float())
    for cache, row, scale in zip(caches, rows, scales, strict=True):
        if scale is not None:
            row = (row / scale[:, None]).clamp(-448, 448)
        # As bytes: index_copy_ does not support float8.
        stored = row.to(cache.dtype).view(torch.uint8)
        cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, stored)
    return rotate(query).to(query.dtype)


CASES = [
    case
    for name, models in (("bf16", MODELS), ("fp8", MODELS[:1]))
    for case in by_tokens(
        "rotary",
        name,
        partial(_rotary, float8=name == "fp8"),
        lambda model: {
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "dim": model.head_dim,
        },
        {"tokens": 19, "heads": 6, "kv_heads": 2, "dim": 16},
        models=models,
    )
]
