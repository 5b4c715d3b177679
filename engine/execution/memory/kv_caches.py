"""The KV caches: of every layer on the device, and for swapped-out KV on the host; their copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.core.schedule import SchedulerOutput
from engine.layers.attention import LayerCache
from engine.models.kv_groups import KVGroups
from engine.models.spec import AttentionSpec, LayerSpec, StateShape
from engine.nvtx import nvtx_range
from kernels.block_copy import BlockCopier
from kernels.cpu.large_pages import zeros_on_demand
from kernels.state.states import StateCache


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    *,
    groups: KVGroups,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerCache]:
    """Return the zeroed KV cache of every layer with attention; different groups share one.

    All are one allocation: torch rounds each large one up to 2 MiB. `dtype` is that of the cache,
    which may be float8_e4m3fn.
    """
    shape = (groups.num_caches, 2, num_blocks, block_size, num_kv_heads, head_dim)
    zeros = zeroed_on_demand if device.type == "cpu" else partial(torch.zeros, device=device)
    caches = zeros(shape, dtype=dtype)
    return [
        LayerCache(caches[cache, 0], caches[cache, 1], group)
        for group, cache in groups.layer_caches
    ]


def allocate_state_caches(
    num_blocks: int, shapes: Sequence[StateShape], *, dtype: torch.dtype, device: torch.device
) -> list[StateCache]:
    """Return the zeroed states of every layer that keeps some, in `num_blocks` blocks each.

    `dtype` is that of the activations, which a convolution's inputs have.
    """
    zeros = zeroed_on_demand if device.type == "cpu" else partial(torch.zeros, device=device)
    found = []
    for shape in shapes:
        ring = zeros((num_blocks, shape.kernel, shape.channels), dtype=dtype)
        state = None
        if shape.heads:
            matrices = (num_blocks, shape.heads, shape.key_dim, shape.value_dim)
            state = zeros(matrices, dtype=torch.float32)
        found.append(StateCache(ring, state))
    return found


def caches_by_layer(
    layers: Sequence[LayerSpec], kv_cache: Sequence[LayerCache], states: Sequence[StateCache]
) -> list[LayerCache | StateCache]:
    """Return the cache of each layer, of those of layers with attention and of the others."""
    attentions, others = iter(kv_cache), iter(states)
    return [
        next(attentions) if isinstance(layer.mixer, AttentionSpec) else next(others)
        for layer in layers
    ]


def distinct_caches(kv_cache: Sequence[LayerCache]) -> list[Tensor]:
    """Return the keys and values of the layers, those that several share once."""
    shared = {layer.key.data_ptr(): layer for layer in kv_cache}
    return [cache for layer in shared.values() for cache in (layer.key, layer.value)]


def zeroed_on_demand(shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on the CPU whose pages the system allocates on the first write.

    Writing gigabytes of zeros takes seconds, and commits the memory before it is needed.
    """
    return zeros_on_demand(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Caches of `num_blocks` blocks each; `caches_per_chunk` of them share an allocation.

    torch rounds an allocation of pinned memory up to a power of two bytes, `chunk_bytes`.
    """

    num_blocks: int
    caches_per_chunk: int
    chunk_bytes: int


def plan_host_cache(num_bytes: int, num_caches: int, block_bytes: int) -> HostLayout:
    """Return the layout with the most blocks whose chunks fit into `num_bytes` together."""
    found = HostLayout(0, num_caches, 0)
    for power in range(num_bytes.bit_length()):
        num_chunks = num_bytes >> power
        caches_per_chunk = -(-num_caches // num_chunks)
        num_blocks = (1 << power) // (caches_per_chunk * block_bytes)
        if num_blocks > found.num_blocks:
            found = HostLayout(num_blocks, caches_per_chunk, 1 << power)
    return found


def allocate_host_cache(caches: Sequence[Tensor], num_bytes: int) -> list[Tensor]:
    """Return uninitialised host caches like `caches`, with another number of blocks, possibly 0.

    They take at most `num_bytes` of host memory, pinned if `caches` are on a GPU.
    """
    like = caches[0]
    cache_bytes = like[0].nbytes
    layout = plan_host_cache(num_bytes, len(caches), cache_bytes)
    num_chunks = -(-len(caches) // layout.caches_per_chunk)
    chunks = [
        torch.empty(layout.chunk_bytes, dtype=torch.uint8, pin_memory=like.is_cuda)
        for _ in range(num_chunks)
    ]
    size = layout.num_blocks * cache_bytes
    pieces = [
        chunk[i * size : (i + 1) * size] for chunk in chunks for i in range(layout.caches_per_chunk)
    ]
    return [
        piece.view(like.dtype).view(layout.num_blocks, *like.shape[1:])
        for piece in pieces[: len(caches)]
    ]


@nvtx_range("move blocks")
def move_blocks(copier: BlockCopier, schedule: SchedulerOutput) -> None:
    """Carry out the block moves of `schedule`, before anything else of its step."""
    # Swap-outs first: their blocks may be reused by the copies and swap-ins. Swap-ins last: they
    # may reuse the source of a copy, and may bring back what has just been swapped out.
    for pairs, move in (
        (schedule.swap_out, copier.swap_out),
        (schedule.copies, copier.copy),
        (schedule.swap_in, copier.swap_in),
    ):
        if len(pairs):
            move(pairs[:, 0].tolist(), pairs[:, 1].tolist())
