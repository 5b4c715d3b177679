"""What groups of layers with windows hold, give back and find again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.kv.group_windows import GroupWindows, blocks_for
from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from tests.factories.requests import append_tokens, make_request, reuse_prefix

SIZE = 4


def make(
    *windows: int | None, num_blocks: int = 60, step: int = 8, hosts: int = 0
) -> KVCacheManager:
    return KVCacheManager(
        num_blocks,
        SIZE,
        enable_prefix_caching=True,
        num_host_blocks=hosts,
        windows=GroupWindows(windows, SIZE, max_step_tokens=step),
    )


def compute(cache: KVCacheManager, request: Request, num_tokens: int) -> None:
    assert cache.allocate(request, num_tokens, reserve=True) is not None
    request.num_computed_tokens += num_tokens
    cache.prefix_cache.commit(request, request.num_computed_tokens)
    cache.check_integrity([request])


def num_used(cache: KVCacheManager) -> int:
    return cache.pool.num_usable - cache.pool.num_free


def test_blocks_behind_the_window_are_given_back() -> None:
    cache, request = make(None, 6), make_request(1, range(24))
    compute(cache, request, 8)
    # All blocks of the first group at once, of the second those of the step.
    assert list(map(len, request.kv.tables)) == [6, 2]
    compute(cache, request, 8)
    compute(cache, request, 8)
    # The next token, at 24, sees 19 to 24; two tokens before it might be computed again.
    full, windowed = request.kv.tables
    assert len(set(full)) == 6
    assert 0 not in full
    assert windowed[:2] == [0, 0]
    assert 0 not in windowed[2:]
    cache.free(request)
    cache.check_idle()


@given(
    window=st.integers(1, 30),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
def test_never_more_blocks_than_planned_are_held(window: int, chunks: list[int]) -> None:
    cache = make(window, None, num_blocks=400, step=9)
    request = make_request(1, [i % 7 for i in range(sum(chunks))])
    for i, count in enumerate(chunks):
        compute(cache, request, count)
        most = cache.windows.sequence_blocks(sum(chunks))
        assert num_used(cache) <= most
        windowed = sum(block != 0 for block in request.kv.tables[0])
        assert windowed <= cache.windows.most_blocks(window, sum(chunks[: i + 1]))


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=4),
    num_blocks=st.integers(0, 60),
    step=st.integers(1, 30),
)
def test_the_longest_sequence_is_the_longest_that_fits(
    windows: list[int | None], num_blocks: int, step: int
) -> None:
    found = GroupWindows(windows, SIZE, max_step_tokens=step)
    longest = found.longest_sequence(num_blocks)
    assert found.sequence_blocks(longest) <= num_blocks
    if longest < 2**30:
        assert found.sequence_blocks(longest + 1) > num_blocks
    else:
        assert None not in windows


def test_a_prefix_needs_only_the_last_window_of_a_group() -> None:
    cache, first = make(None, 6), make_request(1, range(24))
    for _ in range(3):
        compute(cache, first, 8)
    cache.free(first)
    # What was given back is still found by its content: the whole prefix is there.
    again = make_request(2, [*range(24), 99])
    again.num_computed_tokens = reuse_prefix(cache, again)
    assert again.num_computed_tokens == 24
    full, windowed = again.kv.tables
    assert 0 not in full
    assert windowed[:4] == [0] * 4
    assert 0 not in windowed[4:]
    cache.check_integrity([again])


@pytest.mark.parametrize(("lost", "found"), [(5, 20), (4, 16), (3, 24), (0, 24)])
def test_a_prefix_ends_where_a_window_has_lost_a_block(lost: int, found: int) -> None:
    """A token after 24 sees 19 to 24, after 20 15 to 20, and after 16 11 to 16: two blocks each."""
    cache, first = make(None, 6), make_request(1, range(24))
    tables = []
    for _ in range(3):
        compute(cache, first, 8)
        tables.append(list(first.kv.tables[1]))
    block = max(table[lost] for table in tables if lost < len(table))
    cache.free(first)
    cache.pool.share([block])
    cache.pool.forget([block])
    cache.pool.release([block])
    assert reuse_prefix(cache, make_request(2, [*range(24), 99])) == found


def test_groups_do_not_share_blocks() -> None:
    cache, request = make(9, 9), make_request(1, range(8))
    compute(cache, request, 8)
    first, second = request.kv.tables
    assert not set(first) & set(second)
    same = make_request(2, range(9))
    assert reuse_prefix(cache, same) == 8
    assert same.kv.tables == [first, second]


def test_a_swap_takes_and_brings_back_what_a_token_to_come_sees() -> None:
    cache, request = make(None, 6, hosts=20), make_request(1, range(24))
    for _ in range(3):
        compute(cache, request, 8)
    swaps = cache.swap_out(request)
    assert swaps is not None
    # The next token, at 24, and two before it that might be computed again: 17 to 24.
    assert [[host >= 0 for host in table] for table in request.kv.host_tables] == [
        [True] * 6,
        [False] * 4 + [True] * 2,
    ]
    cache.check_integrity([request])
    append_tokens(request, [5])
    request.num_computed_tokens = request.kv.num_swapped_tokens
    hosts = [list(table) for table in request.kv.host_tables]
    assert cache.allocate(request, 1, reserve=True) is not None
    back = cache.swap_in(request, [])
    assert {swap.source for swap in back} == {swap.destination for swap in swaps}
    destination = {swap.source: swap.destination for swap in back}
    for table, host_table in zip(request.kv.tables, hosts, strict=True):
        assert [destination.get(host, 0) for host in host_table] == table[:6]
    cache.check_integrity([request])


def test_the_number_of_blocks_for_tokens() -> None:
    assert [blocks_for(n, SIZE) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
