import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.host_cache import allocate_host_cache, plan_host_cache
from kernels.block_copy import BlockCopier


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
