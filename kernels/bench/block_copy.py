"""Copies of KV blocks in all layers, on the device and to the host, next to indexing in torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.bench.case import Case, Work, numel_bytes, randn
from kernels.bench.shapes import LLAMA_8B
from kernels.block_copy import BlockCopier

_BLOCK_SIZE = 16


def _copy(
    blocks: int,
    to_host: bool,
    layers: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Work:
    shape = (_BLOCK_SIZE, kv_heads, dim)
    caches = [
        randn(2 * blocks, *shape, dtype=dtype, device=device, seed=i) for i in range(2 * layers)
    ]
    order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(0))
    sources, destinations = order[:blocks], order[blocks:]
    written = caches
    if to_host:
        destinations = torch.arange(blocks)
        pinned = device.type == "cuda"
        written = [torch.zeros(blocks, *shape, dtype=dtype, pin_memory=pinned) for _ in caches]
    copier = BlockCopier(caches, written if to_host else ())
    ours = copier.swap_out if to_host else copier.copy
    return Work(
        ours=partial(ours, sources.tolist(), destinations.tolist()),
        peers={"index_select": partial(_torch, caches, written, sources, destinations)},
        bytes=numel_bytes(*written),  # on the device half is read, half written
        written=tuple(written),
        graph=False,  # block ids come from the host, whose time counts
    )


def _torch(
    read: list[Tensor], written: list[Tensor], sources: Tensor, destinations: Tensor
) -> None:
    sources = sources.to(read[0].device, non_blocking=True)
    destinations = destinations.to(written[0].device, non_blocking=True)
    for source, destination in zip(read, written, strict=True):
        chosen = source.index_select(0, sources)
        if chosen.device == destination.device:
            destination.index_copy_(0, destinations, chosen)
        else:
            destination.copy_(chosen, non_blocking=True)


CASES = [
    Case(
        operation="block_copy",
        name=f"{'swap out' if to_host else 'copy'} {LLAMA_8B.label} {blocks} blocks",
        build=_copy,
        shape={
            "blocks": blocks,
            "to_host": to_host,
            "layers": LLAMA_8B.layers,
            "kv_heads": LLAMA_8B.kv_heads,
            "dim": LLAMA_8B.head_dim,
            "dtype": torch.bfloat16,
        },
        tiny={"blocks": 3, "layers": 2, "kv_heads": 2, "dim": 8, "dtype": torch.float32},
    )
    for blocks, to_host in ((512, False), (1, False), (64, True))
]
