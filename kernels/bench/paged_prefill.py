"""Prefill attention, without and with a computed prefix, next to torch's on contiguous tensors."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kernels.bench.attention import Paged, geometry, tiny_geometry
from kernels.bench.case import LLAMA, QWEN, Aim, Case, Model, Work, randn
from kernels.paged_cache import FP8
from kernels.paged_prefill import paged_prefill_attention

_BLOCK_SIZE = 16
Chunk = tuple[int, int]  # tokens computed before, tokens computed now


def _prefill(
    chunks: list[Chunk],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> Work:
    lengths = [prefix + count for prefix, count in chunks]
    counts = [count for _, count in chunks]
    paged = Paged.random(lengths, kv_heads, dim, block_size, cache_dtype, device)
    query = randn(sum(counts), heads, dim, dtype=dtype, device=device, seed=2)
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    scale = dim**-0.5
    keys, values = paged.contiguous(dtype)
    compiled = {}
    if len(set(chunks)) == 1:
        q = query.unflatten(0, (len(chunks), -1)).transpose(1, 2).contiguous()
        form = partial(_alike, q, keys, values, scale)
        mask = _mask(chunks[0], device)
        compiled["flex"] = partial(_flex, q, keys, values, mask, scale)
    else:
        form = partial(_one_by_one, query.split(counts), lengths, keys, values, scale)
    return Work(
        ours=partial(
            paged_prefill_attention,
            *(query, paged.key_cache, paged.value_cache, paged.block_tables, starts),
            paged.seq_lens,
            scale=scale,
            key_scale=paged.key_scale,
            value_scale=paged.value_scale,
        ),
        peers={"sdpa": form},
        compiled=compiled,
        # Two products of 2 operations per element, for every pair of a query and a visible key.
        flops=4 * heads * dim * sum(n * prefix + n * (n + 1) // 2 for prefix, n in chunks),
    )


def _alike(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend for chunks of equal shape: [B, H, n, D] to [T, H, D]."""
    bias = causal_lower_right(query.shape[2], keys.shape[2])
    out = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=bias, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)


def _one_by_one(
    queries: tuple[Tensor, ...], lengths: list[int], keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Attend one sequence at a time."""
    outs = [
        _alike(query.transpose(0, 1)[None], k[None, :, :length], v[None, :, :length], scale)
        for query, length, k, v in zip(queries, lengths, keys, values, strict=True)
    ]
    return torch.cat(outs)


def _mask(chunk: Chunk, device: torch.device) -> BlockMask:
    prefix, count = chunk

    def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q + prefix

    return create_block_mask(sees, None, None, count, prefix + count, device=str(device))


def _flex(query: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, scale: float) -> Tensor:
    out = flex_attention(query, keys, values, block_mask=mask, scale=scale, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).flatten(0, 1)


def _case(
    name: str,
    model: Model,
    chunks: list[Chunk],
    cache_dtype: torch.dtype = torch.bfloat16,
    block_size: int = _BLOCK_SIZE,
    aim: Aim | None = None,
    compile: bool = False,
) -> Case:
    tiny: list[Chunk] = [(0, 37)]
    if len(set(chunks)) > 1:
        tiny = [(0, 9), (40, 17)]
    elif len(chunks) > 1:
        tiny = [(0, 21)] * 2
    elif chunks[0][0]:
        tiny = [(20, 18)]
    return Case(
        operation="paged_prefill",
        name=name,
        build=_prefill,
        shape={"chunks": chunks, **geometry(model, block_size, cache_dtype)},
        tiny={"chunks": tiny, **tiny_geometry(cache_dtype)},
        aim=aim,
        compile=compile,
    )


_AIM = Aim(share=0.6)
_MIXED = [(0, 1024), (2048, 512), (7000, 333), (100, 179)]
CASES = [
    _case("8B 1 x 8k", LLAMA, [(0, 8192)], aim=_AIM, compile=True),
    _case("8B 1 x 8k blocks of 64", LLAMA, [(0, 8192)], block_size=64, aim=_AIM),
    _case("8B fp8 1 x 8k", LLAMA, [(0, 8192)], FP8, aim=_AIM),
    _case("8B 8 x 1k", LLAMA, [(0, 1024)] * 8, compile=True),
    _case("8B 2k behind 6k", LLAMA, [(6144, 2048)], aim=_AIM, compile=True),
    _case("8B mixed chunks", LLAMA, _MIXED),
    _case("0.5B 1 x 8k", QWEN, [(0, 8192)]),
    _case("0.5B 8 x 1k", QWEN, [(0, 1024)] * 8),
    _case("0.5B 2k behind 6k", QWEN, [(6144, 2048)]),
]
