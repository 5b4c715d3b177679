"""States of sequences: blocks, checkpoints, which of them are kept, and what a hit begins with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.core.kv.block_pool import NULL_BLOCK
from engine.core.kv.state_manager import StateManager, StatePool
from engine.core.kv.state_saves import MOST_SAVES, positions_to_save, prompt_end
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.update_from_output import OutputUpdater
from tests.factories.arrivals import Arrival, arrivals, schedulers, serve
from tests.factories.paged_oracle import PagedOracle, check_output
from tests.factories.requests import make_request, make_scheduler

INTERVAL = 4


def scheduler_with_states(num_states: int = 60, **changes: Any) -> Scheduler:
    settings = {"num_blocks": 400, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return make_scheduler(num_states=num_states, state_interval=INTERVAL, **{**settings, **changes})


def served(oracle: PagedOracle, *requests: Request) -> list[int]:
    """Serve requests that come together; return how many tokens of each were cached."""
    for request in requests:
        oracle.scheduler.add([request])
    oracle.run()
    for request in requests:
        check_output(request)
    return [request.num_cached_tokens for request in requests]


def states_of(scheduler: Scheduler) -> StateManager:
    assert scheduler.kv_cache.states is not None
    return scheduler.kv_cache.states


# The pool.


def add(pool: StatePool, name: bytes, num_tokens: int) -> int:
    taken = pool.allocate(1)
    assert taken is not None
    pool.add_checkpoint(taken[0], name, num_tokens)
    return taken[0]


def test_the_checkpoint_goes_first_that_saves_the_fewest_tokens() -> None:
    pool = StatePool(4)
    for name, num_tokens in ((b"a", 100), (b"b", 10), (b"c", 50)):
        add(pool, name, num_tokens)
    add(pool, b"d", 70)
    assert pool.find(b"b") is None
    add(pool, b"e", 10)  # the clock is at 10: d is worth 80
    assert pool.find(b"c") is None
    add(pool, b"f", 1)  # at 50: e is worth 60, which is less than d and a still
    assert pool.find(b"e") is None
    assert pool.find(b"d") is not None
    assert pool.find(b"a") is not None
    pool.check_integrity()


def test_old_checkpoints_go_before_used_ones_of_the_same_worth() -> None:
    pool = StatePool(4)
    old, used = add(pool, b"old", 50), add(pool, b"used", 50)
    for i in range(3):
        add(pool, b"%d" % i, 20)
    pool.share([used])
    pool.release([used])  # a hit
    for i in range(3, 5):
        add(pool, b"%d" % i, 35)
    assert pool.find(b"old") is None
    assert pool.find(b"used") == used
    assert old != used


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "add", "share", "release"]), st.integers(0, 50)),
        max_size=60,
    )
)
def test_the_pool_keeps_its_accounts(steps: list[tuple[str, int]]) -> None:
    pool, held = StatePool(6), list[int]()
    for number, (kind, value) in enumerate(steps):
        if kind == "take" and (taken := pool.allocate(1)):
            held += taken
        elif kind == "add" and pool.num_free:
            add(pool, b"%d" % number, value)
        elif kind == "share" and (block := pool.find(b"%d" % value)) is not None:
            pool.share([block])
            held.append(block)
        elif kind == "release" and held:
            pool.release([held.pop(value % len(held))])
        pool.check_integrity()
    pool.release(held)
    pool.check_idle()


# Positions.


@given(
    start=st.integers(0, 200),
    length=st.integers(1, 200),
    num_prompt_tokens=st.integers(1, 300),
    wanted=st.sets(st.integers(1, 50).map(lambda n: 4 * n), max_size=6),
    every=st.sampled_from([4, 8, 40]),
)
def test_positions_are_passed_multiples(
    start: int, length: int, num_prompt_tokens: int, wanted: set[int], every: int
) -> None:
    end = start + length
    found = positions_to_save(
        start,
        end,
        interval=4,
        num_prompt_tokens=num_prompt_tokens,
        wanted=wanted,
        every=every,
    )
    assert len(set(found)) == len(found) <= MOST_SAVES
    assert all(start < position <= end and position % 4 == 0 for position in found)
    passed = sorted(position for position in wanted if start < position <= end)
    assert found[: len(passed)] == passed[:MOST_SAVES]
    last = end // 4 * 4
    if len(passed) < MOST_SAVES and last > max(start, num_prompt_tokens):
        assert last in found


def test_a_prompt_ends_before_the_tokens_that_begin_an_answer() -> None:
    assert [prompt_end(n, 64) for n in (1, 71, 72, 135, 136, 1000)] == [0, 0, 64, 64, 128, 960]


# Hits.


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_turn_computes_what_is_new(num_ahead: int) -> None:
    oracle = PagedOracle(scheduler_with_states(), num_ahead)
    prompt = [i % 40 for i in range(31)]
    first = make_request(1, prompt, max_tokens=15)
    assert served(oracle, first) == [0]
    answered = first.token_ids.tolist()  # of which the last has not been computed
    assert served(oracle, make_request(2, [*answered, 1, 2, 3])) == [(len(answered) - 1) // 4 * 4]
    # A turn without the answer goes back to the end of the prompt.
    assert served(oracle, make_request(3, [*prompt[:-3], 9, 9, 9, 9])) == [20]


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("budget", [16, 64])
def test_prompts_that_come_together_share_what_they_have_in_common(
    num_ahead: int, budget: int
) -> None:
    """The second one hits already, where the prompts part, and not the third."""
    oracle = PagedOracle(scheduler_with_states(max_num_batched_tokens=budget), num_ahead)
    requests = [make_request(i, [7] * 21 + [i] * 8) for i in range(6)]
    assert served(oracle, *requests) == [0] + [20] * 5


def test_where_prompts_part_is_saved_for_the_third() -> None:
    oracle = PagedOracle(scheduler_with_states())
    asked = [make_request(i, [7] * 21 + [i] * 20) for i in range(3)]
    # The second begins at one of the places after every 16 tokens.
    assert [served(oracle, request) for request in asked] == [[0], [16], [20]]
    scheduler = oracle.scheduler
    assert (scheduler.num_prefix_hits, scheduler.num_prefix_lost) == (36, 4)


def test_an_answer_keeps_one_checkpoint_beside_those_in_the_prompt() -> None:
    scheduler = scheduler_with_states()
    served(PagedOracle(scheduler), make_request(1, [3] * 20, max_tokens=60))
    # At 12, and at every 16 tokens; and the newest one, at 76.
    assert states_of(scheduler).pool.num_cached == len({12, 16, 32, 48, 64, 76})


def test_an_answer_that_comes_again_leaves_others_checkpoints() -> None:
    """It drops the one before the newest only where that is its own."""
    scheduler = scheduler_with_states()
    oracle = PagedOracle(scheduler)
    prompt = [3] * 20
    first = make_request(1, prompt, max_tokens=60)
    served(oracle, first)
    begun = [*first.token_ids.tolist()[:50], *[9] * 6]  # whose prompt ends at 48
    shared = [*first.token_ids.tolist()[:42], *[8] * 6]  # at 40, which is no place of others
    served(oracle, make_request(2, begun), make_request(3, shared))
    served(oracle, make_request(4, prompt, max_tokens=60))
    assert served(oracle, make_request(5, shared)) == [40]


def test_a_request_begins_as_soon_as_a_state_is_free() -> None:
    """Those that others read for the last time are free in the next step."""
    scheduler = scheduler_with_states(num_states=10, max_num_batched_tokens=256)
    oracle = PagedOracle(scheduler)
    prompts = [[i] * 16 for i in range(7)]
    for uid, prompt in enumerate(prompts):
        served(oracle, make_request(uid, prompt, max_tokens=1))
    for uid, prompt in enumerate(prompts):
        scheduler.add([make_request(10 + uid, [*prompt, 30], max_tokens=40)])
    for _ in range(4):
        oracle.step()
    assert len(scheduler.running) == 7
    oracle.run()


def test_salts_are_apart() -> None:
    oracle = PagedOracle(scheduler_with_states())
    asked = [make_request(i, [5] * 30, cache_salt=salt) for i, salt in enumerate("aab")]
    assert [served(oracle, request) for request in asked] == [[0], [20], [0]]


def test_states_without_their_kv_are_dropped() -> None:
    scheduler = scheduler_with_states(num_blocks=14)
    oracle = PagedOracle(scheduler)
    served(oracle, make_request(1, [1] * 30, max_tokens=2))
    served(oracle, make_request(2, [2] * 44, max_tokens=2))
    assert states_of(scheduler).pool.num_cached <= 44 // INTERVAL
    assert served(oracle, make_request(3, [1] * 30, max_tokens=2)) == [0]


def test_without_a_prefix_cache_there_are_no_checkpoints() -> None:
    scheduler = scheduler_with_states(num_states=10, enable_prefix_caching=False)
    oracle = PagedOracle(scheduler)
    assert served(oracle, *(make_request(i, [5] * 30) for i in range(4))) == [0] * 4
    assert states_of(scheduler).pool.num_cached == 0


@given(
    asked=st.lists(arrivals(abort=st.none()), min_size=1, max_size=8),
    scheduler=schedulers(
        enable_prefix_caching=st.just(True),
        num_blocks=st.just(400),
        spare_states=st.just(400),
        windows=st.just((None,)),
    ),
)
def test_an_unlimited_pool_has_the_state_where_prompts_end(
    asked: list[Arrival], scheduler: Scheduler
) -> None:
    """Then whoever comes again begins where the prompt ended, or further on."""
    oracle = PagedOracle(scheduler)
    serve(oracle, asked, [arrival.group(uid) for uid, arrival in enumerate(asked)])
    for uid, arrival in enumerate(asked):
        again = arrival.group(100 + uid)[0]
        scheduler.add([again])
        oracle.run()
        end = prompt_end(again.num_prompt_tokens, states_of(scheduler).interval)
        assert again.num_cached_tokens >= end


# What would go wrong. Each of these changes is found by the properties.


def _name_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name checkpoints when their step is scheduled, whether it runs or not."""
    launch = OutputUpdater.launch

    def launch_and_name(self: OutputUpdater, schedule: Any) -> Any:
        found = launch(self, schedule)
        self._name_states()
        self._saves.append([])
        return found

    monkeypatch.setattr(OutputUpdater, "launch", launch_and_name)


def _do_not_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up the block that a row reads before the step is complete."""
    allocate = StateManager.allocate

    def allocate_and_release(self: StateManager, request: Request) -> None:
        allocate(self, request)
        self.release_replaced()

    monkeypatch.setattr(StateManager, "allocate", allocate_and_release)


def _write_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the state that is read, though others share it."""
    needs = StateManager.needs_block

    def needs_no_copy(self: StateManager, request: Request) -> bool:
        return needs(self, request) and request.kv.state == NULL_BLOCK

    monkeypatch.setattr(StateManager, "needs_block", needs_no_copy)


def _begin_without_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with the KV that is cached, though no state is."""

    def newest(self: Any, request: Request, most: int) -> tuple[int, int]:
        return most // INTERVAL * INTERVAL, NULL_BLOCK

    monkeypatch.setattr("engine.core.kv.prefix_cache.PrefixCache._newest_state", newest)


_MISTAKES = [_name_at_once, _do_not_pin, _write_shared, _begin_without_a_state]


@pytest.mark.parametrize("mistake", [None, *_MISTAKES])
def test_the_properties_find_mistakes(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake is None:
        _serve_any()
        return
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=r"state is read|two rows|another writes|is written"):
        _serve_any()


@settings(
    max_examples=200,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
@given(
    asked=st.lists(arrivals(), min_size=2, max_size=8),
    scheduler=schedulers(enable_prefix_caching=st.just(True), spare_states=st.integers(0, 12)),
    stop=st.integers(0, 40),
    num_ahead=st.sampled_from([0, 1]),
)
def _serve_any(asked: list[Arrival], scheduler: Scheduler, stop: int, num_ahead: int) -> None:
    groups = [arrival.group(uid) for uid, arrival in enumerate(asked)]
    for group in groups:
        for request in group:
            request.stop_token_ids = frozenset([stop])
    serve(PagedOracle(scheduler, num_ahead), asked, groups)
    scheduler.kv_cache.check_idle()
