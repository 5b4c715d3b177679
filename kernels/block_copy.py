"""Copies KV blocks in all layers at once: copy-on-write, swap-out to host memory and swap-in.

All layers share block ids, so one launch copies a block in every cache, using a table of the
caches' addresses that is built once. Blocks are copied as raw bytes, 16 per access.

All sources of a call are read before any destination is written, even if the destination of one
copy is the source of another. Such dependent copies form a chain, ordered so that each source is
read before it is overwritten. Each byte depends only on bytes at the same offset in other blocks,
so one program processes a whole chain for its piece of the blocks without synchronising with any
other program. For a cycle, one block's piece is kept in registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.checks import check_contiguous, check_device, check_dtype
from kernels.step.upload import upload

BlockIds = Iterable[int] | Tensor
Copy = tuple[int, int]  # source, destination

KEPT = -1  # pseudo block id: the piece kept in registers
_ACCESS = 16  # bytes


class _Memory(NamedTuple):
    """Caches of equal dtype and shape, and their addresses: int64 [len(caches)] on the device."""

    caches: tuple[Tensor, ...]
    addresses: Tensor


class BlockCopier:
    """Copies blocks in the caches of all layers; holds references to them and their addresses."""

    def __init__(self, caches: Sequence[Tensor], host_caches: Sequence[Tensor] = ()) -> None:
        """Copy within `caches`, and between them and `host_caches`.

        Args:
            caches: the key and value caches of all layers, each contiguous [num_blocks, ...], of
                one dtype and shape.
            host_caches: the matching caches in pinned host memory, in the same order; equal among
                each other, their number of blocks may differ from that of `caches`.

        Raises:
            ValueError: caches differ, are not contiguous or not pinned, or a block is not a
                multiple of 16 bytes.
        """
        if not caches:
            raise ValueError("caches: must not be empty")
        where = caches[0].device
        _check_caches("caches", caches, like=caches[0], where=where)
        if host_caches:
            if len(host_caches) != len(caches):
                raise ValueError(
                    f"host_caches: must have {len(caches)} elements, as caches (got "
                    f"{len(host_caches)})"
                )
            host = where if where.type == "meta" else torch.device("cpu")
            _check_caches("host_caches", host_caches, like=caches[0], where=host)
            if where.type == "cuda" and not all(cache.is_pinned() for cache in host_caches):
                raise ValueError("host_caches: must be in pinned memory")
        self._caches = _Memory(tuple(caches), _addresses(caches, where))
        self._host_caches = _Memory(tuple(host_caches), _addresses(host_caches, where))

    def copy(self, sources: BlockIds, destinations: BlockIds) -> None:
        """Copy block `sources[i]` to block `destinations[i]` in every cache, on the current stream.

        Every source is read before any destination is written.

        Args:
            sources, destinations: as many of each, no destination twice; tensors: int64 on the CPU.

        Raises:
            ValueError: an argument has a wrong shape, dtype, length or device, an id is out of
                range, or a destination occurs twice.
        """
        self._run(self._caches, self._caches, sources, destinations)

    def swap_out(self, sources: BlockIds, destinations: BlockIds) -> None:
        """Copy device blocks to host blocks (swap-out); otherwise as `copy`.

        The host must not read the destinations before the stream has reached this point.

        Raises:
            ValueError: as from `copy`; or there are no `host_caches`.
        """
        self._run(self._caches, self._host_caches, sources, destinations)

    def swap_in(self, sources: BlockIds, destinations: BlockIds) -> None:
        """Copy host blocks to device blocks (swap-in); otherwise as `copy`.

        The host must not overwrite the sources before the stream has reached this point.

        Raises:
            ValueError: as from `copy`; or there are no `host_caches`.
        """
        self._run(self._host_caches, self._caches, sources, destinations)

    def warm_up(self) -> None:
        """Launch the kernel of all copies without one, so that it is compiled."""
        if device.runs_triton(self._caches.caches[0]):
            _launch(self._caches, self._caches, [[]])

    def _run(
        self, read: _Memory, written: _Memory, sources: BlockIds, destinations: BlockIds
    ) -> None:
        if not read.caches or not written.caches:
            raise ValueError("host_caches: are required to swap blocks, but there are none")
        copies = _pairs(sources, destinations, len(read.caches[0]), len(written.caches[0]))
        if not device.runs_triton(self._caches.caches[0]):
            _torch(read.caches, written.caches, copies)
            return
        _launch(read, written, chains(copies) if read is written else [[copy] for copy in copies])


def reference(
    caches: Sequence[Tensor], sources: Sequence[int], destinations: Sequence[int]
) -> list[Tensor]:
    """Return the caches as `BlockCopier.copy` leaves them."""
    copied = [cache.clone() for cache in caches]
    _torch(caches, copied, list(zip(sources, destinations, strict=True)))
    return copied


def chains(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Return `copies` as independent chains, each in an order that is safe to execute.

    A copy that overwrites a block comes after the copies that read that block. A cycle begins with
    a copy of one block to KEPT and ends with a copy from KEPT.
    """
    source_of = {destination: source for source, destination in copies if source != destination}
    readers: dict[int, list[int]] = {}
    for destination, source in source_of.items():
        readers.setdefault(source, []).append(destination)

    def tree(copy: Copy) -> list[Copy]:
        """Return `copy`, preceded by all copies that read its destination, recursively."""
        found = [copy]
        for _, block in found:  # grows during the loop
            found += [(block, reader) for reader in readers.get(block, ())]
        return found[::-1]

    found = [tree((s, d)) for d, s in source_of.items() if s not in source_of]
    cyclic = source_of.keys() - {block for chain in found for _, block in chain}
    while cyclic:
        block, passed = min(cyclic), set[int]()
        while block not in passed:  # towards the cycle, then once around it
            passed.add(block)
            block = source_of[block]
        cycle = [block]
        while (block := source_of[block]) != cycle[0]:
            cycle.append(block)
        inside = set(cycle)
        branches = [(b, reader) for b in cycle for reader in readers[b] if reader not in inside]
        chain = [copy for branch in branches for copy in tree(branch)]
        chain.append((cycle[0], KEPT))
        chain += [(source, destination) for destination, source in pairwise(cycle)]
        chain.append((KEPT, cycle[-1]))
        found.append(chain)
        cyclic -= {block for _, block in chain}
    return found


def _torch(sources: Sequence[Tensor], destinations: Sequence[Tensor], copies: list[Copy]) -> None:
    read, written = torch.tensor(copies, dtype=torch.int64).reshape(-1, 2).unbind(1)
    for source, destination in zip(sources, destinations, strict=True):
        # Advanced indexing reads all sources into a new tensor before index_copy_ writes.
        destination.view(torch.uint8)[written] = source.view(torch.uint8)[read]


@triton.jit
def _kernel(
    source_addresses_ptr,
    destination_addresses_ptr,
    copies_ptr,
    chain_start_ptr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_chain, i_cache, i_piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o = i_piece * BLOCK + tl.arange(0, BLOCK)
    m = o < WORDS
    p_source = tl.load(source_addresses_ptr + i_cache).to(tl.pointer_type(tl.int64))
    p_destination = tl.load(destination_addresses_ptr + i_cache).to(tl.pointer_type(tl.int64))
    p_source = tl.multiple_of(p_source, 16)
    p_destination = tl.multiple_of(p_destination, 16)
    b_kept = tl.zeros([BLOCK], dtype=tl.int64)
    for i_copy in range(tl.load(chain_start_ptr + i_chain), tl.load(chain_start_ptr + i_chain + 1)):
        i_source = tl.load(copies_ptr + 2 * i_copy)
        i_destination = tl.load(copies_ptr + 2 * i_copy + 1)
        if i_source >= 0:
            b_words = tl.load(p_source + i_source * WORDS + o, mask=m)  # [BLOCK]
        else:
            b_words = b_kept
        if i_destination >= 0:
            tl.store(p_destination + i_destination * WORDS + o, b_words, mask=m)
        else:
            b_kept = b_words
        # All threads have read the block that the next copy of the chain overwrites.
        tl.debug_barrier()


def settings(num_words: int) -> dict[str, int]:
    """Return tile size and warps for blocks of `num_words` 8-byte words: 4 accesses per thread.

    A piece of 16 KiB has enough bytes in flight and amortises the start of a program.
    """
    block = min(device.next_power_of_2(num_words), 2048)
    return {"BLOCK": block, "num_warps": max(block // 256, 1), "num_stages": 1}


def _launch(read: _Memory, written: _Memory, chains: Sequence[Sequence[Copy]]) -> None:
    if not chains:
        return
    flat = [block for chain in chains for copy in chain for block in copy]
    starts = [0, *accumulate(map(len, chains))]
    packed = upload(np.array(flat + starts, dtype=np.int64), read.addresses.device)
    num_words = _block_bytes(read.caches[0]) // 8
    tile = settings(num_words)
    _kernel[(len(chains), len(read.caches), device.cdiv(num_words, tile["BLOCK"]))](
        source_addresses_ptr=read.addresses,
        destination_addresses_ptr=written.addresses,
        copies_ptr=packed,
        chain_start_ptr=packed[len(flat) :],
        WORDS=num_words,
        **tile,
    )


def _addresses(caches: Sequence[Tensor], where: torch.device) -> Tensor:
    return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=where)


def _block_bytes(cache: Tensor) -> int:
    return prod(cache.shape[1:]) * cache.element_size()


def _check_caches(
    name: str, caches: Sequence[Tensor], *, like: Tensor, where: torch.device
) -> None:
    for i, cache in enumerate(caches):
        check_dtype(f"{name}[{i}]", cache, like.dtype)
        check_device(f"{name}[{i}]", cache, where)
        check_contiguous(f"{name}[{i}]", cache)
        if cache.dim() < 2 or cache.shape[1:] != like.shape[1:]:
            raise ValueError(
                f"{name}[{i}]: must have blocks of shape {list(like.shape[1:])} (got shape "
                f"{list(cache.shape)})"
            )
        if len(cache) != len(caches[0]):
            raise ValueError(
                f"{name}[{i}]: must have {len(caches[0])} blocks, as {name}[0] (got {len(cache)})"
            )
        if cache.data_ptr() % _ACCESS or _block_bytes(cache) % _ACCESS or not _block_bytes(cache):
            raise ValueError(
                f"{name}[{i}]: the address and the size of its blocks must be multiples of "
                f"{_ACCESS} bytes (got blocks of {_block_bytes(cache)} bytes)"
            )


def _pairs(
    sources: BlockIds,
    destinations: BlockIds,
    num_sources: int,
    num_destinations: int,
) -> list[Copy]:
    read = _block_ids("sources", sources, num_sources)
    written = _block_ids("destinations", destinations, num_destinations)
    if len(read) != len(written):
        raise ValueError(
            f"destinations: must have {len(read)} elements, as sources (got {len(written)})"
        )
    if len(set(written)) != len(written):
        twice = next(block for block in written if written.count(block) > 1)
        raise ValueError(f"destinations: must not repeat a block (block {twice} does)")
    return list(zip(read, written, strict=True))


def _block_ids(name: str, block_ids: BlockIds, num_blocks: int) -> list[int]:
    if isinstance(block_ids, Tensor):
        check_dtype(name, block_ids, torch.int64)
        check_device(name, block_ids, torch.device("cpu"))
        if block_ids.dim() != 1:
            raise ValueError(f"{name}: must have shape [N] (got {list(block_ids.shape)})")
        block_ids = block_ids.tolist()
    found = list(block_ids)
    for block in found:
        if not 0 <= block < num_blocks:
            raise ValueError(f"{name}: blocks must be 0 to {num_blocks - 1} (got {block})")
    return found
