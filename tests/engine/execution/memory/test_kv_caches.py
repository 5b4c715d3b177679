import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.ragged import Int32s
from engine.execution.memory.kv_caches import (
    allocate_host_cache,
    allocate_kv_cache,
    distinct_caches,
    move_blocks,
    plan_host_cache,
    zeroed_on_demand,
)
from engine.models.kv_groups import KVGroups
from kernels.block_copy import BlockCopier
from tests.factories.sampling import EMPTY


@given(
    num_bytes=st.integers(0, 2**37),
    num_caches=st.integers(1, 200),
    block_bytes=st.integers(1, 2**9).map(lambda n: 16 * n),
)
def test_the_layout_stays_within_its_bytes(
    num_bytes: int, num_caches: int, block_bytes: int
) -> None:
    layout = plan_host_cache(num_bytes, num_caches, block_bytes)
    num_chunks = -(-num_caches // layout.caches_per_chunk)
    assert num_chunks * layout.chunk_bytes <= num_bytes
    # What torch rounds up to a power of two is one already.
    assert layout.chunk_bytes & (layout.chunk_bytes - 1) == 0
    assert layout.caches_per_chunk * layout.num_blocks * block_bytes <= layout.chunk_bytes
    # One chunk for each cache is always possible, and wastes less than a half and a block.
    assert layout.num_blocks >= num_bytes // num_caches // 2 // block_bytes


def test_most_of_the_space_is_used() -> None:
    for num_gib in (1, 4, 6, 20):
        layout = plan_host_cache(num_gib << 30, 64, 2**15)
        assert layout.num_blocks * 64 * 2**15 > 0.95 * (num_gib << 30)


def test_caches_do_not_overlap_and_can_be_swapped_with() -> None:
    device = [torch.full((3, 2, 4), i, dtype=torch.bfloat16) for i in range(6)]
    host = allocate_host_cache(device, 500)
    assert [cache.shape for cache in host] == [torch.Size([4, 2, 4])] * 6
    copier = BlockCopier(device, host)
    for block in range(4):
        copier.swap_out([1], [block])
    for i, cache in enumerate(host):
        assert cache.eq(i).all()


def test_there_may_be_no_room_for_a_block() -> None:
    device = [torch.zeros(3, 2, 4)] * 2
    for num_bytes in (0, 63):
        assert [cache.shape for cache in allocate_host_cache(device, num_bytes)] == [(0, 2, 4)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_zeros_of_any_type_that_can_be_written(dtype: torch.dtype) -> None:
    tensor = zeroed_on_demand((3, 5, 7), dtype=dtype)
    assert tensor.shape == (3, 5, 7)
    assert tensor.dtype == dtype
    assert not tensor.float().any()
    tensor[2, 4] = torch.ones(7).to(dtype)
    assert tensor.float().sum() == 7


def test_the_memory_lives_as_long_as_a_part_of_it() -> None:
    rows = [zeroed_on_demand((1000, 100), dtype=torch.float32)[999] for _ in range(20)]
    for i, row in enumerate(rows):
        row.fill_(i)
    gc.collect()
    assert all((row == i).all() for i, row in enumerate(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_the_caches_of_all_layers_are_one_allocation(dtype: torch.dtype) -> None:
    layers = allocate_kv_cache(
        5,
        16,
        groups=KVGroups.single(3),
        num_kv_heads=2,
        head_dim=4,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    caches = distinct_caches(layers)
    assert len(caches) == 6
    assert len({cache.untyped_storage().data_ptr() for cache in caches}) == 1
    assert all(cache.shape == (5, 16, 2, 4) and cache.is_contiguous() for cache in caches)
    assert not any(cache.float().any() for cache in caches)
    for i, cache in enumerate(caches):
        cache.fill_(i)
    assert all((cache.float() == i).all() for i, cache in enumerate(caches))


def pairs(*moves: tuple[int, int]) -> Int32s:
    return np.array(moves, dtype=np.int32).reshape(-1, 2)


def test_nothing_is_overwritten_before_it_is_read() -> None:
    device = torch.arange(6.0)[:, None].repeat(1, 4)
    host = 10 + torch.arange(3.0)[:, None].repeat(1, 4)
    schedule = replace(
        EMPTY,
        swap_out=pairs((1, 0), (2, 1)),
        copies=pairs((3, 1), (1, 4)),  # block 1 went out, and has a new owner
        swap_in=pairs((2, 3), (0, 2)),  # 3 has been copied; host's 0 has just come
    )
    move_blocks(BlockCopier([device], [host]), schedule)
    assert host[:, 0].tolist() == [1, 2, 12]
    assert device[:, 0].tolist() == [0, 3, 1, 12, 1, 5]


def test_a_step_may_move_nothing() -> None:
    device = torch.ones(2, 4)
    move_blocks(BlockCopier([device]), EMPTY)
    assert device.eq(1).all()
