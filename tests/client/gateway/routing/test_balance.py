"""Who gets a request: rules that hold for all loads and matches."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client import ConfigurationError
from client.gateway.routing.balance import Balance, Candidate
from client.gateway.routing.prefixes import PrefixTree

BALANCES = st.builds(
    Balance,
    cache_threshold=st.floats(0, 1),
    balance_abs_threshold=st.integers(0, 100),
    balance_rel_threshold=st.floats(1, 4),
)
CANDIDATES = st.lists(
    st.builds(Candidate, load=st.integers(0, 300), match=st.integers(0, 50)), min_size=1, max_size=6
)
CHANCE = st.integers(0, 2**32).map(random.Random)


@given(BALANCES, CANDIDATES, CHANCE)
def test_a_cached_prefix_decides_only_within_the_load_bound(
    balance: Balance, candidates: list[Candidate], chance: random.Random
) -> None:
    index = balance.choose(candidates, 50, chance)
    chosen, least = candidates[index], min(each.load for each in candidates)
    others = [each.load for i, each in enumerate(candidates) if i != index]
    if others and chosen.load > max(others):
        # Two choices never take the one that has most: this is for its cache.
        assert chosen.match == max(each.match for each in candidates) > 0
        assert chosen.match >= balance.cache_threshold * 50
        assert (
            chosen.load - least <= balance.balance_abs_threshold
            or chosen.load <= balance.balance_rel_threshold * least
        )


@given(CANDIDATES, CHANCE)
def test_the_longest_prefix_wins_among_servers_with_as_much_to_do(
    candidates: list[Candidate], chance: random.Random
) -> None:
    even = [Candidate(7, each.match) for each in candidates]
    index = Balance(cache_threshold=0).choose(even, 50, chance)
    longest = max(each.match for each in even)
    assert longest == 0 or even[index].match == longest


@given(CHANCE)
def test_choose_equal_prefixes_takes_the_less_loaded(chance: random.Random) -> None:
    candidates = [Candidate(9, match=40), Candidate(4, match=40), Candidate(3, match=1)]
    assert Balance().choose(candidates, 50, chance) == 1


@given(CHANCE)
def test_a_prompt_that_nobody_knows_goes_where_the_cache_has_more_room(
    chance: random.Random,
) -> None:
    idle = [Candidate(3, cached=8), Candidate(3, cached=5)]
    assert Balance().choose(idle, 50, chance) == 1
    busier = [Candidate(3, cached=8), Candidate(4, cached=0)]
    assert Balance().choose(busier, 50, chance) == 0


@given(st.integers(0, 20), st.floats(1, 3), CHANCE)
def test_the_load_of_two_servers_stays_within_the_bound(
    absolute: int, relative: float, chance: random.Random
) -> None:
    """All send the same prompt and nothing finishes: the worst for who has it cached."""
    balance = Balance(0.5, absolute, relative)
    loads, trees = [0, 0], [PrefixTree(10), PrefixTree(10)]
    for _ in range(150):
        candidates = [
            Candidate(load, tree.match([1, 2])) for load, tree in zip(loads, trees, strict=True)
        ]
        index = balance.choose(candidates, 2, chance)
        trees[index].add([1, 2])
        loads[index] += 1
        assert max(loads) <= max(min(loads) + absolute, min(loads) * relative) + 1


@given(st.integers(2, 5), st.booleans(), CHANCE)
def test_no_server_starves(num_servers: int, same_prompt: bool, chance: random.Random) -> None:
    balance = Balance(0.3, balance_abs_threshold=4, balance_rel_threshold=1.5)
    loads, trees = [0] * num_servers, [PrefixTree(100) for _ in range(num_servers)]
    served, running = [0] * num_servers, list[int]()
    for prompt in range(100 * num_servers):
        hashes = [0, 1] if same_prompt else [prompt, -prompt]
        candidates = [
            Candidate(load, tree.match(hashes)) for load, tree in zip(loads, trees, strict=True)
        ]
        index = balance.choose(candidates, 2, chance)
        trees[index].add(hashes)
        loads[index] += 1
        served[index] += 1
        running.append(index)
        if len(running) > 8 * num_servers:  # the servers are as fast as each other
            loads[running.pop(chance.randrange(len(running)))] -= 1
    assert min(served) >= 100 / 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_threshold": 1.5},
        {"balance_abs_threshold": -1},
        {"balance_rel_threshold": 0.9},
        {"balance_rel_threshold": float("nan")},
    ],
)
def test_thresholds_have_ranges(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Balance(**wrong)  # type: ignore[arg-type]
