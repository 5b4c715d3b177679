from array import array

from engine.core.kv.kv_cache_manager import BlockCopy, KVCacheManager
from engine.core.request import Request
from tests.factories.requests import append_tokens, make_request, reuse_prefix


def compute(cache: KVCacheManager, request: Request, num_tokens: int) -> list[BlockCopy] | None:
    copies = cache.allocate(request, num_tokens)
    if copies is not None:
        request.num_computed_tokens += num_tokens
        cache.prefix_cache.commit(request, min(request.num_computed_tokens, request.num_tokens))
    return copies


def test_a_full_block_is_shared_and_the_last_token_is_always_left() -> None:
    cache = KVCacheManager(10, 4, enable_prefix_caching=True)
    first = make_request(1, range(8))
    assert compute(cache, first, 8) == []
    assert first.kv.tables == [[1, 2]]

    same = make_request(2, range(8))
    assert reuse_prefix(cache, same) == 4
    assert same.kv.tables == [[1]]

    longer = make_request(3, range(9))
    assert reuse_prefix(cache, longer) == 8
    assert longer.kv.tables == [[1, 2]]


def test_a_different_beginning_shares_nothing_behind_it() -> None:
    cache = KVCacheManager(10, 4, enable_prefix_caching=True)
    compute(cache, make_request(1, [1, 2, 3, 4, 5, 6, 7, 8]), 8)
    assert reuse_prefix(cache, make_request(2, [9, 2, 3, 4, 5, 6, 7, 8, 9])) == 0


def test_requests_share_blocks_only_with_the_same_salt() -> None:
    cache = KVCacheManager(10, 4, enable_prefix_caching=True)
    for uid, salt in enumerate(("", "a")):
        compute(cache, make_request(uid, range(8), cache_salt=salt), 8)
    for salt, num_tokens in (("", 8), ("a", 8), ("b", 0), ("A", 0)):
        assert reuse_prefix(cache, make_request(9, range(9), cache_salt=salt)) == num_tokens


def test_no_salt_stands_for_a_block_that_is_known() -> None:
    """A salt of the very bytes that a block's hash is made of must not find what follows it."""
    cache = KVCacheManager(10, 4, enable_prefix_caching=True)
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    compute(cache, make_request(1, first + second), 8)
    forged = array("i", first).tobytes().decode()
    assert reuse_prefix(cache, make_request(2, [*second, 9], cache_salt=forged)) == 0


def test_caching_can_be_switched_off() -> None:
    cache = KVCacheManager(10, 4, enable_prefix_caching=False)
    compute(cache, make_request(1, range(8)), 8)
    assert reuse_prefix(cache, make_request(2, range(8))) == 0


def test_what_does_not_fit_changes_nothing() -> None:
    cache = KVCacheManager(3, 4, enable_prefix_caching=True)
    request = make_request(1, range(12))
    assert cache.allocate(request, 12) is None
    assert request.kv.tables == []
    assert cache.pool.num_free == 2


def test_a_fork_copies_the_block_it_writes_into_and_no_other() -> None:
    cache = KVCacheManager(10, 4, enable_prefix_caching=True)
    parent = make_request(1, range(6))
    compute(cache, parent, 6)
    child = make_request(1, range(6), index=1)
    cache.fork(parent, child)
    assert compute(cache, child, 1) == [BlockCopy(2, 3)]
    assert child.kv.tables == [[1, 3]]
    # The parent is alone on block 2 now and writes in place.
    assert compute(cache, parent, 1) == []
    assert parent.kv.tables == [[1, 2]]
    cache.check_integrity([parent, child])
    cache.free(parent)
    cache.free(child)
    assert cache.pool.num_free == cache.pool.num_usable


def test_the_tail_is_evicted_before_the_prefix() -> None:
    cache = KVCacheManager(4, 4, enable_prefix_caching=True)
    request = make_request(1, range(12))
    compute(cache, request, 12)
    cache.free(request)
    compute(cache, make_request(2, [40, 41]), 2)
    assert reuse_prefix(cache, make_request(3, range(13))) == 8


def test_a_block_with_an_unread_token_is_findable_once_it_has_been_read() -> None:
    cache = KVCacheManager(10, 4, enable_prefix_caching=True)
    request = make_request(1, range(3))
    compute(cache, request, 3)
    compute(cache, request, 1)  # of the token that the step before samples
    assert reuse_prefix(cache, make_request(2, range(5))) == 0
    append_tokens(request, [3])
    cache.prefix_cache.commit(request, min(request.num_computed_tokens, request.num_tokens))
    assert reuse_prefix(cache, make_request(3, range(5))) == 4
