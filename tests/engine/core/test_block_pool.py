import pytest

from engine.core.block_pool import NULL_BLOCK, BlockPool


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
