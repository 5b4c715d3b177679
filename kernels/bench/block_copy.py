"""Copies of KV blocks in all layers, on the device and to the host, next to indexing in torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.bench.case import LLAMA, Case, Work, numel_bytes, randn
from kernels.block_copy import BlockCopier

_BLOCK_SIZE = 16


def _copy(
    blocks: int, layers: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> Work:
    caches = _caches(2 * blocks, layers, kv_heads, dim, dtype, device)
    order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(0))
    sources, destinations = order[:blocks], order[blocks:]
    copier = BlockCopier(caches)
    return Work(
        ours=partial(copier.copy, sources.tolist(), destinations.tolist()),
        peers={"index_select": partial(_torch, caches, caches, sources, destinations)},
        bytes=numel_bytes(*caches),  # half of each is read, the other half written
        written=tuple(caches),
        graph=False,  # block ids come from the host
    )


def _swap_out(
    blocks: int, layers: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> Work:
    caches = _caches(2 * blocks, layers, kv_heads, dim, dtype, device)
    pinned = device.type == "cuda"
    host = [torch.zeros(blocks, *cache.shape[1:], dtype=dtype) for cache in caches]
    host = [cache.pin_memory() if pinned else cache for cache in host]
    order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(0))
    sources, destinations = order[:blocks], torch.arange(blocks)
    copier = BlockCopier(caches, host)
    return Work(
        ours=partial(copier.swap_out, sources.tolist(), destinations.tolist()),
        peers={"index_select, copy_": partial(_torch_swap, caches, host, sources)},
        bytes=numel_bytes(*host),
        written=tuple(host),
        graph=False,
    )


def _caches(
    blocks: int, layers: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    shape = (blocks, _BLOCK_SIZE, kv_heads, dim)
    return [randn(*shape, dtype=dtype, device=device, seed=i) for i in range(2 * layers)]


def _torch(
    read: list[Tensor], written: list[Tensor], sources: Tensor, destinations: Tensor
) -> None:
    device = read[0].device
    sources = sources.to(device, non_blocking=True)
    destinations = destinations.to(device, non_blocking=True)
    for source, destination in zip(read, written, strict=True):
        destination.index_copy_(0, destinations, source.index_select(0, sources))


def _torch_swap(caches: list[Tensor], host: list[Tensor], sources: Tensor) -> None:
    sources = sources.to(caches[0].device, non_blocking=True)
    for cache, destination in zip(caches, host, strict=True):
        destination.copy_(cache.index_select(0, sources), non_blocking=True)


_TINY = {"blocks": 3, "layers": 2, "kv_heads": 2, "dim": 8, "dtype": torch.float32}

CASES = [
    Case(
        operation="block_copy",
        name=f"{name} 8B {blocks} blocks",
        build=build,
        shape={
            "blocks": blocks,
            "layers": 32,
            "kv_heads": LLAMA.kv_heads,
            "dim": LLAMA.head_dim,
            "dtype": torch.bfloat16,
        },
        tiny=_TINY,
    )
    for name, build, blocks in (
        ("copy", _copy, 512),
        ("copy", _copy, 1),
        ("swap_out", _swap_out, 64),
    )
]
