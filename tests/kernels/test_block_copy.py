from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.block_copy import KEPT, BlockCopier, Copy, chains, reference
from tests.kernels.support import DEVICE
from tests.kernels.vast_memory import vast_zeros

NUM_BLOCKS = 12
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
# Bytes per block: less than a program's piece, not a multiple of it, several pieces.
SHAPES = [(16, 1, 64), (16, 5, 80), (32, 8, 96), (16, 8, 128)]

CASES: dict[str, list[Copy]] = {
    "none": [],
    "one": [(3, 7)],
    "fan-out": [(1, 2), (1, 3), (1, 4), (1, 11)],
    "onto-itself": [(5, 5), (1, 2)],
    "chain": [(1, 2), (2, 3), (3, 4), (4, 5)],
    "exchange": [(1, 2), (2, 1)],
    "cycle-with-branches": [(1, 2), (2, 3), (3, 1), (2, 5), (5, 6), (5, 7), (3, 8)],
    "all-at-once": [(4, 3), (3, 4), (0, 1), (1, 2), (9, 10), (10, 11), (11, 9), (5, 6)],
}
each_case = pytest.mark.parametrize("copies", CASES.values(), ids=CASES.keys())


def random_caches(
    num_layers: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    num_blocks: int = NUM_BLOCKS,
    seed: int = 0,
    pinned: bool = False,
) -> list[Tensor]:
    """Return key and value caches of random bytes, including NaN patterns."""
    generator = torch.Generator().manual_seed(seed)
    size = (num_blocks, *shape[:-1], shape[-1] * dtype.itemsize)
    found = []
    for _ in range(2 * num_layers):
        cache = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        host = cache.pin_memory() if DEVICE.type == "cuda" else cache
        found.append((host if pinned else cache.to(DEVICE)).view(dtype))
    return found


def assert_same_bytes(found: list[Tensor], expected: list[Tensor]) -> None:
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def split(copies: list[Copy]) -> tuple[list[int], list[int]]:
    return [source for source, _ in copies], [destination for _, destination in copies]


def expected_content(copies: list[Copy], num_blocks: int) -> list[int]:
    """Return which block's content each block then has, if all reads precede all writes."""
    content = list(range(num_blocks))
    for source, destination in copies:
        content[destination] = source
    return content


def carry_out(order: list[list[Copy]], content: list[int]) -> list[int]:
    """Return `content` after running the chains, one copy at a time."""
    content = list(content)
    for chain in order:
        kept = None
        for source, destination in chain:
            value = kept if source == KEPT else content[source]
            if destination == KEPT:
                kept = value
            else:
                content[destination] = value
    return content


def check_chains(copies: list[Copy], num_blocks: int) -> None:
    """Assert that the chains have the effect of the copies, and that they are independent."""
    order = chains(copies)
    assert carry_out(order, list(range(num_blocks))) == expected_content(copies, num_blocks)
    written = [{d for _, d in chain} - {KEPT} for chain in order]
    touched = [{b for copy in chain for b in copy} - {KEPT} for chain in order]
    for i, blocks in enumerate(written):
        assert all(not blocks & others for j, others in enumerate(touched) if j != i)


@each_case
def test_chains_are_in_a_working_order_and_independent(copies: list[Copy]) -> None:
    check_chains(copies, NUM_BLOCKS)


def test_copies_that_do_not_depend_on_each_other_run_beside_each_other() -> None:
    assert len(chains([(1, 2), (1, 3), (4, 5)])) == 3
    assert len(chains([(1, 2), (2, 3), (1, 4)])) == 2


@each_case
def test_the_reference_reads_everything_before_it_writes(copies: list[Copy]) -> None:
    caches = random_caches(1, (16, 1, 64), torch.float32)
    before = [cache.clone() for cache in caches]
    expected = [cache.clone() for cache in caches]
    for source, destination in copies:
        for old, new in zip(before, expected, strict=True):
            new[destination] = old[source]
    assert_same_bytes(reference(caches, *split(copies)), expected)
    assert_same_bytes(caches, before)


@each_case
def test_copies(copies: list[Copy]) -> None:
    caches = random_caches(3, (16, 5, 80), torch.float16)
    expected = reference(caches, *split(copies))
    BlockCopier(caches).copy(*split(copies))
    assert_same_bytes(caches, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_size_of_block(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    copies = CASES["cycle-with-branches"]
    caches = random_caches(1, shape, dtype)
    expected = reference(caches, *split(copies))
    BlockCopier(caches).copy(*split(copies))
    assert_same_bytes(caches, expected)


def test_ids_may_be_tensors() -> None:
    caches = random_caches(1, (16, 1, 64), torch.float16)
    expected = reference(caches, [1, 2], [2, 3])
    BlockCopier(caches).copy(torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert_same_bytes(caches, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_swapping_out_and_in(dtype: torch.dtype) -> None:
    shape = (16, 5, 80)
    caches = random_caches(2, shape, dtype)
    host = random_caches(2, shape, dtype, num_blocks=5, seed=1, pinned=True)
    expected = [cache.clone() for cache in host]
    # Ids that would be dependent, or name the same block, within one memory.
    sources, destinations = [2, 3, 11, 4], [3, 2, 0, 4]
    for there, here in zip(expected, caches, strict=True):
        there.view(torch.uint8)[destinations] = here.view(torch.uint8)[sources].cpu()
    before = [cache.clone() for cache in caches]
    copier = BlockCopier(caches, host)
    copier.swap_out(sources, destinations)
    if DEVICE.type == "cuda":
        torch.cuda.current_stream().synchronize()
    assert_same_bytes(host, expected)
    assert_same_bytes(caches, before)

    for cache in caches:
        cache.view(torch.uint8)[sources] = 0
    copier.swap_in(destinations, sources)
    assert_same_bytes(caches, before)
    assert_same_bytes(host, expected)


def test_addresses_beyond_32_bits() -> None:
    """Block ids times 8-byte words exceed 2**31, in a cache with mostly unmapped pages."""
    last = 2**31 // 128 + 1  # blocks of 1024 bytes
    cache = vast_zeros((last + 1) * 1024).view(-1, 16, 64)
    cache[1] = torch.randint(1, 256, (16, 64), dtype=torch.uint8).to(DEVICE)
    copier = BlockCopier([cache])
    copier.copy([1], [last])
    copier.copy([last], [2])
    assert torch.equal(cache[last], cache[1])
    assert torch.equal(cache[2], cache[1])


def test_ids_of_no_block_are_refused_before_anything_is_copied() -> None:
    caches = random_caches(1, (16, 1, 64), torch.float16)
    before = [cache.clone() for cache in caches]
    copier = BlockCopier(caches, random_caches(1, (16, 1, 64), torch.float16, pinned=True)[:2])
    for sources, destinations, message in (
        ([1, 12], [2, 3], "sources: blocks must be 0 to 11"),
        ([1, 2], [-1, 3], r"destinations: .*got -1"),
        ([1, 2], [3, 3], "destinations: must not repeat a block"),
        ([1, 2], [3], "destinations: must have 2 elements"),
        (torch.tensor([1.0]), [3], "sources: must be torch.int64"),
        (torch.tensor([[1]]), [3], "sources: must have shape"),
        (torch.tensor([1], device="meta"), [3], "sources: must be on cpu"),
    ):
        for method in (copier.copy, copier.swap_out, copier.swap_in):
            with pytest.raises(ValueError, match=message):
                method(sources, destinations)
    assert_same_bytes(caches, before)


def test_swapping_counts_the_blocks_of_either_side() -> None:
    caches = random_caches(1, (16, 1, 64), torch.float16)
    host = random_caches(1, (16, 1, 64), torch.float16, num_blocks=3, pinned=True)
    copier = BlockCopier(caches, host)
    with pytest.raises(ValueError, match="destinations: blocks must be 0 to 2"):
        copier.swap_out([3], [3])
    with pytest.raises(ValueError, match="sources: blocks must be 0 to 2"):
        copier.swap_in([3], [3])
    with pytest.raises(ValueError, match="host_caches: are required"):
        BlockCopier(caches).swap_out([1], [1])
    with pytest.raises(ValueError, match="host_caches: are required"):
        BlockCopier(caches).swap_in([1], [1])


def test_wrong_caches_are_named() -> None:
    first, second = random_caches(1, (16, 1, 64), torch.float16)
    with pytest.raises(ValueError, match="caches: must not be empty"):
        BlockCopier([])
    with pytest.raises(ValueError, match=r"caches\[1\]: must be torch\.float16"):
        BlockCopier([first, second.float()])
    with pytest.raises(ValueError, match=r"caches\[1\]: must be on"):
        BlockCopier([first, second.to("meta")])
    with pytest.raises(ValueError, match=r"caches\[0\]: must be contiguous"):
        BlockCopier([first.transpose(1, 3)])
    with pytest.raises(ValueError, match=r"caches\[1\]: must have blocks of shape \[16, 1, 64\]"):
        BlockCopier([first, second.view(-1, 32, 1, 32)])
    with pytest.raises(ValueError, match=r"caches\[1\]: must have 12 blocks"):
        BlockCopier([first, second[:4]])
    with pytest.raises(ValueError, match=r"caches\[0\]: must have blocks of shape \[\]"):
        BlockCopier([first.flatten()])
    with pytest.raises(ValueError, match=r"caches\[0\]: the address and the size"):
        BlockCopier([first.flatten()[1:-63].view(-1, 64)])
    with pytest.raises(ValueError, match="got blocks of 14 bytes"):
        BlockCopier([first.flatten()[:70].view(-1, 7)])
    with pytest.raises(ValueError, match="host_caches: must have 2 elements"):
        BlockCopier([first, second], [first.cpu()])
    with pytest.raises(ValueError, match=r"host_caches\[0\]: must have blocks of shape"):
        BlockCopier([first], [first.cpu().view(-1, 32, 1, 32)])
    if DEVICE.type == "cuda":
        with pytest.raises(ValueError, match="host_caches: must be in pinned memory"):
            BlockCopier([first], [first.cpu()])


def test_long_chains_and_cycles() -> None:
    blocks = list(range(4000))
    random.Random(0).shuffle(blocks)
    copies = [*pairwise(blocks[:2001]), *pairwise(blocks[2001:]), (blocks[-1], blocks[2001])]
    order = chains(copies)
    assert sorted(map(len, order)) == [2000, 2000]  # a cycle keeps one block in registers
    assert carry_out(order, list(range(4000))) == expected_content(copies, 4000)
