"""Rotary embedding with the KV cache write, next to eager torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.bench.case import ELEMENTWISE, LLAMA, MODELS, Case, Work, numel_bytes, randn
from kernels.rotary import rotary_and_cache

_BLOCK_SIZE = 16
_FP8 = torch.float8_e4m3fn


def _rotary(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> Work:
    # Views of one fused projection, as in the model.
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    fused = randn(tokens, sum(sizes), dtype=dtype, device=device).split(sizes, dim=-1)
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in fused)
    angles = randn(tokens, dim // 2, dtype=torch.float32, device=device, seed=1)
    cos, sin = angles.cos(), angles.sin()
    blocks = -(-tokens // _BLOCK_SIZE) + 1
    shape = (blocks, _BLOCK_SIZE, kv_heads, dim)
    key_cache = torch.zeros(shape, dtype=cache_dtype, device=device)
    value_cache = torch.zeros_like(key_cache)
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)).to(device) + 1
    place = torch.arange(tokens, device=device)
    slots = order[place // _BLOCK_SIZE] * _BLOCK_SIZE + place % _BLOCK_SIZE
    key_scale = value_scale = None
    if cache_dtype == _FP8:
        key_scale = torch.full((kv_heads,), 0.02, device=device)
        value_scale = torch.full((kv_heads,), 0.03, device=device)
    arguments = (query, key, value, cos, sin, key_cache, value_cache, slots)
    form = partial(_torch, *arguments, key_scale, value_scale)
    written = numel_bytes(query) + 2 * key.numel() * key_cache.element_size()
    return Work(
        ours=partial(rotary_and_cache, *arguments, key_scale=key_scale, value_scale=value_scale),
        peers={"eager": form},
        compiled={"compiled": form},
        bytes=numel_bytes(query, key, value, cos, sin, slots) + written,
        written=(key_cache, value_cache),
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
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    for cache, rows, scale in (
        (key_cache, rotate(key), key_scale),
        (value_cache, value, value_scale),
    ):
        if scale is None:
            cache.flatten(0, 1).index_copy_(0, slots, rows.to(cache.dtype))
        else:
            stored = (rows.float() / scale[:, None]).clamp(-448, 448).to(_FP8)
            # index_copy_ does not support float8.
            bytes_ = cache.view(torch.uint8).flatten(0, 1)
            bytes_.index_copy_(0, slots, stored.view(torch.uint8))
    return rotate(query).to(query.dtype)


CASES = [
    Case(
        operation="rotary",
        name=f"{'fp8 ' if cache_dtype == _FP8 else ''}{model.label} {tokens}",
        build=_rotary,
        shape={
            "tokens": tokens,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "dim": model.head_dim,
            "dtype": torch.bfloat16,
            "cache_dtype": cache_dtype,
        },
        tiny={
            "tokens": 19,
            "heads": 6,
            "kv_heads": 2,
            "dim": 16,
            "dtype": torch.float32,
            "cache_dtype": cache_dtype if cache_dtype == _FP8 else torch.float32,
        },
        aim=ELEMENTWISE if tokens == 8192 and model is LLAMA else None,
        compile=tokens == 8192 and model is LLAMA,
    )
    for model, cache_dtype in (
        *((model, torch.bfloat16) for model in MODELS),
        (LLAMA, _FP8),
    )
    for tokens in (8192, 64, 1)
]
