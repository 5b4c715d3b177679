"""Decode attention, next to torch's on gathered and on contiguous keys and values."""

from __future__ import annotations

import random
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from kernels.bench.attention import Paged, gather, geometry, tiny_geometry
from kernels.bench.case import LLAMA, QWEN, Aim, Case, Model, Work, numel_bytes, randn
from kernels.paged_cache import FP8
from kernels.paged_decode import paged_decode_attention
from kernels.split_plan import num_work_items, plan_splits

_BLOCK_SIZE = 16  # the engine's default
_COPY_US = 10.0  # cases that a copy finishes faster are bound by latency, not bandwidth


def _decode(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> Work:
    paged = Paged.random(lengths, kv_heads, dim, block_size, cache_dtype, device)
    query = randn(len(lengths), heads, dim, dtype=dtype, device=device, seed=2)
    scale = dim**-0.5
    items = num_work_items(len(lengths), kv_heads, device)
    plan = plan_splits(paged.seq_lens, items, kv_heads)
    keys, values = paged.contiguous(dtype)
    mask = None
    if min(lengths) < max(lengths):
        place = torch.arange(max(lengths), device=device)
        mask = (place < paged.seq_lens[:, None])[:, None, None]
    peers = {"sdpa, KV in one run": partial(_packed, query, keys, values, mask, scale)}
    compiled = {}
    if mask is None:
        peers["sdpa gqa, KV in one run"] = partial(_grouped, query, keys, values, scale)
        compiled["flex, KV in one run"] = partial(_flex, query, keys, values, scale)
    if cache_dtype == dtype:
        peers["gather, sdpa"] = partial(_gathered, query, paged, mask, scale)
    return Work(
        ours=partial(
            paged_decode_attention,
            *(query, paged.key_cache, paged.value_cache, paged.block_tables, paged.seq_lens, plan),
            scale=scale,
            key_scale=paged.key_scale,
            value_scale=paged.value_scale,
        ),
        peers=peers,
        compiled=compiled,
        bytes=paged.bytes + 2 * numel_bytes(query),
    )


def _plan(rows: int, kv_heads: int, device: torch.device) -> Work:
    """Return the split-KV planning of a step, which all layers share."""
    seq_lens = torch.arange(1, rows + 1, dtype=torch.int32, device=device) * 8192 // rows
    items = num_work_items(rows, kv_heads, device)
    return Work(
        ours=partial(plan_splits, seq_lens, items, kv_heads),
        bytes=numel_bytes(seq_lens) + 4 * items * (kv_heads + 1),
    )


def _packed(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attend with the heads of a group as the queries of one head: they share their keys."""
    q = query.unflatten(1, (keys.shape[1], -1))
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    return out.flatten(1, 2)


def _grouped(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    q = query.unsqueeze(2)
    out = F.scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=True)
    return out.squeeze(2)


def _gathered(query: Tensor, paged: Paged, mask: Tensor | None, scale: float) -> Tensor:
    keys, values = gather(paged.key_cache, paged), gather(paged.value_cache, paged)
    return _packed(query, keys, values, mask, scale)


def _flex(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    out = flex_attention(query.unsqueeze(2), keys, values, scale=scale, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out.squeeze(2)


def _aim(model: Model, sequences: int, length: int, kv_bytes: int) -> Aim | None:
    """Return the aim from 16 x 1k up, and for 1 x 8k; none for small models in short cases."""
    if sequences * length < 8192:
        return None
    total = sequences * length * 2 * model.kv_heads * model.head_dim * kv_bytes
    if model is not LLAMA and total / 4.3e6 < _COPY_US:
        return None
    return Aim(share=0.75 if sequences == 1 else 0.85)


def _case(
    name: str,
    model: Model,
    lengths: list[int],
    cache_dtype: torch.dtype = torch.bfloat16,
    block_size: int = _BLOCK_SIZE,
    aim: Aim | None = None,
    compile: bool = False,
) -> Case:
    ragged = min(lengths) < max(lengths)
    return Case(
        operation="paged_decode",
        name=name,
        build=_decode,
        shape={"lengths": lengths, **geometry(model, block_size, cache_dtype)},
        tiny={"lengths": [70, 1, 33] if ragged else [70, 70], **tiny_geometry(cache_dtype)},
        aim=aim,
        compile=compile,
    )


def _cases() -> list[Case]:
    sizes = [(s, k) for k in (1024, 8192) for s in (1, 16, 64, 256)]
    cases = [
        _case(
            f"{label} {sequences} x {length // 1024}k",
            model,
            [length] * sequences,
            cache_dtype,
            aim=_aim(model, sequences, length, cache_dtype.itemsize),
            compile=label == "8B" and (sequences, length) in ((64, 1024), (1, 8192)),
        )
        for label, model, cache_dtype, shapes in (
            ("8B", LLAMA, torch.bfloat16, sizes),
            ("8B fp8", LLAMA, FP8, sizes),
            ("0.5B", QWEN, torch.bfloat16, sizes),
            ("0.5B fp8", QWEN, FP8, [(64, 1024), (256, 8192)]),
        )
        for sequences, length in shapes
    ]
    draw = random.Random(0)
    ragged = [draw.randrange(1, 2048) for _ in range(64)]
    aim = Aim(share=0.85)
    cases.append(_case("8B 64 x 1..2k", LLAMA, ragged, aim=aim))
    cases.append(_case("8B 64 x 1k blocks of 64", LLAMA, [1024] * 64, block_size=64, aim=aim))
    cases += [
        Case(
            operation="paged_decode",
            name=f"plan of {rows}",
            build=_plan,
            shape={"rows": rows, "kv_heads": LLAMA.kv_heads},
            tiny={"rows": 5},
        )
        for rows in (64, 256)
    ]
    return cases


CASES = _cases()
