"""Attention over a paged KV cache, next to torch's over the same keys and values in one piece."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.bench.kernels.case import Aim, Case, Work, numel_bytes, randn
from engine.bench.kernels.shapes import LLAMA_8B, QWEN_0_5B, Shape
from kernels.attention.paged_cache import FP8
from kernels.attention.paged_decode import paged_decode_attention
from kernels.attention.paged_prefill import paged_prefill_attention
from kernels.attention.split_plan import num_work_items, plan_splits

Chunk = tuple[int, int]  # tokens computed before, tokens computed now


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer, and how its keys and values are stored."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    float8: bool = False
    block_size: int = 16

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's key and value."""
        return 2 * self.kv_heads * self.dim * (1 if self.float8 else self.dtype.itemsize)


class Paged:
    """Random keys and values of sequences, paged and in one piece.

    Attributes:
        caches: of keys and of values, each [num_blocks, block_size, Hkv, D].
        block_tables: int32 [B, max_blocks], shuffled block ids.
        seq_lens: int32 [B].
        scales: `key_scale` and `value_scale` of a float8 cache.
        dense: keys and values, each [B, Hkv, longest, D]; random behind a sequence's end.
    """

    def __init__(self, lengths: Sequence[int], heads: Heads, device: torch.device) -> None:
        longest, size = max(lengths), heads.block_size
        blocks = -(-longest // size)
        order = torch.randperm(
            len(lengths) * blocks, generator=torch.Generator().manual_seed(0)
        ).to(device)
        self.block_tables = order.argsort().view(len(lengths), blocks).int()
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.scales: dict[str, Any] = {}
        self.caches: list[Tensor] = []
        self.dense: list[Tensor] = []
        shape = (len(lengths), heads.kv_heads, blocks * size, heads.dim)
        for name, value in (("key_scale", 0.02), ("value_scale", 0.015)):
            dense = stored = randn(*shape, dtype=heads.dtype, device=device, seed=len(self.dense))
            if heads.float8:
                self.scales[name] = torch.full((heads.kv_heads,), value, device=device)
                stored = (dense / value).clamp_(-448, 448).to(FP8)
                dense = stored.to(heads.dtype) * value
            paged = stored.transpose(1, 2).reshape(-1, size, heads.kv_heads, heads.dim)
            self.caches.append(paged.contiguous().view(torch.uint8)[order].view(stored.dtype))
            self.dense.append(dense[:, :, :longest])


def _decode(lengths: list[int], heads: Heads, device: torch.device) -> Work:
    paged = Paged(lengths, heads, device)
    (key_cache, value_cache), (keys, values) = paged.caches, paged.dense
    query = randn(len(lengths), heads.heads, heads.dim, dtype=heads.dtype, device=device, seed=2)
    items = num_work_items(len(lengths), heads.kv_heads, device)
    plan = plan_splits(paged.seq_lens, items, heads.kv_heads)
    scale = heads.dim**-0.5
    mask = None
    if min(lengths) < max(lengths):
        position = torch.arange(max(lengths), device=device)
        mask = (position < paged.seq_lens[:, None])[:, None, None]
    return Work(
        ours=partial(
            paged_decode_attention,
            *(query, key_cache, value_cache, paged.block_tables, paged.seq_lens, plan),
            scale=scale,
            **paged.scales,
        ),
        peers={"sdpa": partial(_packed, query, keys, values, mask, scale)},
        bytes=sum(lengths) * heads.kv_bytes + 2 * numel_bytes(query),
    )


def _packed(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attend with the heads of a group as the queries of one head: they share their keys."""
    q = query.unflatten(1, (keys.shape[1], -1))
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    return out.flatten(1, 2)


def _plan(rows: int, kv_heads: int, device: torch.device) -> Work:
    """Return the split-KV planning of a step, which all layers share."""
    seq_lens = torch.arange(1, rows + 1, dtype=torch.int32, device=device) * 8192 // rows
    items = num_work_items(rows, kv_heads, device)
    return Work(
        ours=partial(plan_splits, seq_lens, items, kv_heads),
        bytes=numel_bytes(seq_lens) + 4 * items * (kv_heads + 1),
    )


def _prefill(chunks: list[Chunk], heads: Heads, device: torch.device) -> Work:
    from torch.nn.attention.bias import causal_lower_right  # takes a second too

    lengths, counts = [sum(chunk) for chunk in chunks], [count for _, count in chunks]
    paged = Paged(lengths, heads, device)
    (key_cache, value_cache), (keys, values) = paged.caches, paged.dense
    query = randn(sum(counts), heads.heads, heads.dim, dtype=heads.dtype, device=device, seed=2)
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    scale = heads.dim**-0.5
    if len(set(chunks)) == 1:  # one batch
        parts = [(query.unflatten(0, (len(chunks), -1)).transpose(1, 2), keys, values)]
    else:
        each = zip(query.split(counts), lengths, keys, values, strict=True)
        parts = [(q.transpose(0, 1)[None], k[None, :, :n], v[None, :, :n]) for q, n, k, v in each]
    pairs = sum(n * prefix + n * (n + 1) // 2 for prefix, n in chunks)
    biases = [causal_lower_right(q.shape[2], k.shape[2]) for q, k, _ in parts]
    return Work(
        ours=partial(
            paged_prefill_attention,
            *(query, key_cache, value_cache, paged.block_tables, starts, paged.seq_lens),
            scale=scale,
            **paged.scales,
        ),
        peers={"sdpa": partial(_causal, parts, biases, scale)},
        # Two products of 2 operations per element, for every pair of a query and a visible key.
        flops=4 * heads.heads * heads.dim * pairs,
    )


def _causal(
    parts: list[tuple[Tensor, Tensor, Tensor]], biases: Sequence[Tensor], scale: float
) -> Tensor:
    """Attend batch by batch, [B, H, n, D] to [T, H, D]."""
    found = []
    for (q, k, v), bias in zip(parts, biases, strict=True):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)


def _case(
    name: str, model: Shape, size: Any, tiny: Any, aim: Aim | None = None, block_size: int = 16
) -> Case:
    """Return a case of decoding sequences of these lengths, or of prefilling these chunks."""
    float8 = "fp8" in name
    is_decode = isinstance(size[0], int)
    key = "lengths" if is_decode else "chunks"
    # With a float8 cache the kernels compute in float16, whatever the queries' dtype.
    dtype = torch.float16 if float8 else torch.float32
    sizes = (model.heads, model.kv_heads, model.head_dim, torch.bfloat16)
    return Case(
        "paged_decode" if is_decode else "paged_prefill",
        f"{model.label} {name}",
        _decode if is_decode else _prefill,
        {key: size, "heads": Heads(*sizes, float8, block_size)},
        {key: tiny, "heads": Heads(6, 2, 64, dtype, float8, block_size)},
        aim=aim,
    )


def _decode_aim(model: Shape, sequences: int, length: int) -> Aim | None:
    """Return the aim from 16 x 1k up, and for 1 x 8k; none for a small model in short cases."""
    if sequences * length < 8192 or (model is QWEN_0_5B and sequences * length < 131072):
        return None
    return Aim(share=0.75 if sequences == 1 else 0.85)


_FEW = [(64, 1024), (256, 8192)]
_MANY = [(count, length) for length in (1024, 8192) for count in (1, 16, 64, 256)]
_RAGGED = [random.Random(seed).randrange(1, 2048) for seed in range(64)]
_DECODE_AIM, _AIM = Aim(share=0.85), Aim(share=0.6)
_LONG = ([(0, 8192)], [(0, 37)])
_SHORT = ([(0, 1024)] * 8, [(0, 21)] * 2)
_BEHIND = ([(6144, 2048)], [(20, 18)])
_MIXED = ([(0, 1024), (2048, 512), (7000, 333), (100, 179)], [(0, 9), (40, 17)])
CASES = [
    *(
        _case(
            f"{kind}{count} x {length // 1024}k",
            *(model, [length] * count, [70, 70], _decode_aim(model, count, length)),
        )
        for model, kind, sizes in (
            (LLAMA_8B, "", _MANY),
            (LLAMA_8B, "fp8 ", _MANY),
            (QWEN_0_5B, "", _MANY),
            (QWEN_0_5B, "fp8 ", _FEW),
        )
        for count, length in sizes
    ),
    _case("64 x 1..2k", LLAMA_8B, _RAGGED, [70, 1, 33], _DECODE_AIM),
    _case("64 x 1k blocks of 64", LLAMA_8B, [1024] * 64, [70, 70], _DECODE_AIM, block_size=64),
    *(
        Case("paged_decode", f"plan of {rows}", _plan, {"rows": rows, "kv_heads": 8}, {"rows": 5})
        for rows in (64, 256)
    ),
    _case("1 x 8k", LLAMA_8B, *_LONG, _AIM),
    _case("1 x 8k blocks of 64", LLAMA_8B, *_LONG, _AIM, block_size=64),
    _case("fp8 1 x 8k", LLAMA_8B, *_LONG, _AIM),
    _case("8 x 1k", LLAMA_8B, *_SHORT),
    _case("2k behind 6k", LLAMA_8B, *_BEHIND, _AIM),
    _case("mixed chunks", LLAMA_8B, *_MIXED),
    _case("1 x 8k", QWEN_0_5B, *_LONG),
    _case("8 x 1k", QWEN_0_5B, *_SHORT),
    _case("2k behind 6k", QWEN_0_5B, *_BEHIND),
]
