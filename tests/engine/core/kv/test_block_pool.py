import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.kv.block_pool import NULL_BLOCK, BlockPool


def test_blocks_come_in_order_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert NULL_BLOCK not in [1, 2, 3, 4]


def test_too_few_blocks_is_none_and_changes_nothing() -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check_integrity()


def test_the_block_behind_is_preferred() -> None:
    pool = BlockPool(8)
    first = pool.allocate(2)
    pool.allocate(2)
    assert first == [1, 2]
    pool.release([4])
    assert pool.allocate(1, after=3) == [4]


def test_a_cached_neighbour_is_not_sacrificed_for_adjacency() -> None:
    pool = BlockPool(6)
    pool.allocate(2)
    pool.commit(2, b"content")
    pool.release([2])
    assert pool.allocate(1, after=1) == [3]
    assert pool.find(b"content") == 2


def test_cached_content_survives_until_it_is_the_oldest() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks == [1, 2, 3]
    for block_id, content in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.commit(block_id, content)
    pool.release([2, 3, 1])
    assert pool.allocate(1) == [2]
    assert pool.find(b"b") is None
    assert (pool.find(b"c"), pool.find(b"a")) == (3, 1)
    pool.share([1])
    assert pool.allocate(1) == [3]
    assert pool.find(b"a") == 1
    pool.check_integrity()


def test_blocks_without_content_are_taken_before_cached_ones() -> None:
    pool = BlockPool(5)
    pool.allocate(4)
    for block_id, content in ((1, b"a"), (2, b"b")):
        pool.commit(block_id, content)
    pool.release([2, 1, 3, 4])  # the cached ones first: they are the least recently used
    assert pool.allocate(2) == [3, 4]
    assert (pool.find(b"a"), pool.find(b"b")) == (1, 2)
    assert pool.allocate(1) == [2]  # the tail of the prefix, which was released first
    assert (pool.find(b"a"), pool.find(b"b")) == (1, None)
    pool.check_integrity()


def test_a_prefix_that_is_used_again_is_evicted_last() -> None:
    pool = BlockPool(4)
    for block_id, content in zip(pool.allocate(3) or (), (b"a", b"b", b"c"), strict=True):
        pool.commit(block_id, content)
    pool.release([1, 2, 3])
    pool.share([1])
    pool.release([1])
    assert pool.allocate(3) == [2, 3, 1]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_cached_block_is_evicted_while_another_is_free(data: st.DataObject) -> None:
    """Against a model of the pool, over random allocations, commits and releases."""
    pool = BlockPool(data.draw(st.integers(2, 8), label="num_blocks"))
    used: list[int] = []
    cached: list[int] = []  # free blocks with content, in the order of their release
    num_contents = 0
    for _ in range(data.draw(st.integers(1, 25), label="steps")):
        action = data.draw(st.sampled_from(["allocate", "commit", "release", "share"]))
        if action == "allocate":
            blocks = pool.allocate(1)
            assert (blocks is None) == (len(used) == pool.num_usable)
            for block_id in blocks or ():
                if pool.num_usable - len(used) == len(cached):
                    assert block_id == cached.pop(0)
                assert block_id not in cached
                used.append(block_id)
        elif action == "share" and cached:
            block_id = cached.pop(data.draw(st.integers(0, len(cached) - 1)))
            pool.share([block_id])
            used.append(block_id)
        elif used:
            block_id = data.draw(st.sampled_from(used))
            if action == "commit":
                pool.commit(block_id, b"%d" % num_contents)
                num_contents += 1
            elif action == "release":
                used.remove(block_id)
                pool.release([block_id])
                if any(pool.find(b"%d" % i) == block_id for i in range(num_contents)):
                    cached.append(block_id)
        assert pool.num_usable - pool.num_free == len(used)
        pool.check_integrity()


def test_equal_content_is_indexed_once() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.commit(1, b"same")
    pool.commit(2, b"same")
    assert pool.find(b"same") == 1
    pool.release([1, 2])
    pool.check_integrity()


def test_releasing_twice_is_noticed() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.release([1])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([1])
