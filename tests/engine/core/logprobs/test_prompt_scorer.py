"""Each token of a prompt is scored once, whatever happens to its sequence meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.logprobs.prompt_scores import PromptScores
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.protocol.prompt_logprobs import logprobs_of, positions
from engine.protocol.token_ids import unpack_token_ids
from tests.factories.arrivals import Arrival, arrivals, schedulers, serve
from tests.factories.paged_oracle import PagedOracle, check_output, expected_score
from tests.factories.requests import make_request, make_scheduler

BLOCK_SIZE = 4


def scored_request(
    uid: int, prompt: list[int], *, num_top: int = 0, n: int = 1, **fields: int
) -> list[Request]:
    group = [make_request(uid, prompt, index=index, **fields) for index in range(n)]
    group[0].prompt_scores = PromptScores(group[0].token_ids, num_top)
    return group


def check_scores(request: Request) -> None:
    """Assert that all tokens of the prompt have been scored, in order."""
    scores = request.prompt_scores
    assert scores is not None
    assert scores.is_complete
    prompt = request.token_ids[: request.num_prompt_tokens].tolist()
    message = scores.message()
    assert unpack_token_ids(message.token_ids).tolist() == prompt[1:]
    expected = [expected_score(prompt[: position + 1]) for position in range(1, len(prompt))]
    assert logprobs_of(message).tolist() == expected
    for position, token_id, score in zip(positions(message), prompt[1:], expected, strict=True):
        assert position.token_ids == [token_id] * (1 + scores.num_top)
        assert position.logprobs == [score] * (1 + scores.num_top)
        assert position.ranks[1:] == list(range(1, scores.num_top + 1))


@given(
    asked=st.lists(
        st.tuples(
            arrivals(),
            st.one_of(st.none(), st.integers(0, 3)),  # num_top of those that are scored
        ),
        min_size=1,
        max_size=8,
    ),
    scheduler=schedulers(),
    num_ahead=st.sampled_from([0, 1]),
)
def test_in_any_company(
    asked: list[tuple[Arrival, int | None]], scheduler: Scheduler, num_ahead: int
) -> None:
    """Chunks, prefix hits, forks, preemptions, swaps, aborts, one step ahead: none is lost."""
    groups = [arrival.group(uid) for uid, (arrival, _) in enumerate(asked)]
    for group, (_, num_top) in zip(groups, asked, strict=True):
        if num_top is not None:
            group[0].prompt_scores = PromptScores(group[0].token_ids, num_top)
    serve(PagedOracle(scheduler, num_ahead), [arrival for arrival, _ in asked], groups)
    for group in groups:
        if group[0].finish_reason != "abort" and group[0].prompt_scores is not None:
            check_scores(group[0])
        for request in group:
            if request.finish_reason != "abort":
                check_output(request)


def run_until_computed(oracle: PagedOracle, request: Request, num_tokens: int) -> None:
    while request.num_computed_tokens < num_tokens:
        oracle.step()


def preempt(scheduler: Scheduler, request: Request) -> None:
    """Preempt `request`, the last of those that run."""
    assert scheduler.running[-1] is request
    scheduler._preempt(request)


@pytest.mark.parametrize("num_host_blocks", [0, 20], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_preemption_within_the_prompt(
    num_host_blocks: int, caching: bool, num_ahead: int
) -> None:
    """What is scored already is not scored again, and comes from the cache if it can."""
    scheduler = make_scheduler(
        num_blocks=20,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=6,
        enable_prefix_caching=caching,
        num_host_blocks=num_host_blocks,
    )
    oracle = PagedOracle(scheduler, num_ahead)
    (request,) = scored_request(0, [i % 40 for i in range(31)], num_top=2)
    scheduler.add([request])
    run_until_computed(oracle, request, 18)
    assert request.prompt_scores is not None
    assert request.prompt_scores.num_scheduled == 18
    preempt(scheduler, request)
    num_computed = oracle.num_computed_tokens
    oracle.run()
    check_scores(request)
    # Of 31 tokens and 3 of the output, the KV of 18 (or of their 4 blocks) exists already.
    num_kept = 18 if num_host_blocks else 16 if caching else 0
    assert oracle.num_computed_tokens - num_computed == 31 + 3 - num_kept


def test_a_cached_prefix_is_computed_again_only_for_those_who_want_it_scored() -> None:
    scheduler = make_scheduler(num_blocks=40, block_size=BLOCK_SIZE)
    oracle = PagedOracle(scheduler)
    prompt = [i % 40 for i in range(22)]
    computed = []
    for uid in range(3):
        (request,) = scored_request(uid, prompt, max_tokens=1)
        if uid != 1:
            request.prompt_scores = None
        scheduler.add([request])
        before = oracle.num_computed_tokens
        oracle.run()
        computed.append(oracle.num_computed_tokens - before)
        assert request.num_cached_tokens == 22 - computed[-1]
    assert computed == [22, 22, 2]


def test_a_scored_prompt_is_a_prefix_for_those_who_wait_for_it() -> None:
    """Others do not compute the prefix beside it."""
    scheduler = make_scheduler(num_blocks=40, block_size=BLOCK_SIZE, max_num_batched_tokens=8)
    oracle = PagedOracle(scheduler)
    prompt = [i % 40 for i in range(22)]
    (scored,) = scored_request(0, prompt, max_tokens=1)
    plain = make_request(1, prompt, max_tokens=1)
    scheduler.add([scored])
    scheduler.add([plain])
    oracle.run()
    check_scores(scored)
    assert oracle.num_computed_tokens == 22 + 2
    assert plain.num_cached_tokens == 20


def test_siblings_that_share_the_prompt_do_not_score_it_again() -> None:
    scheduler = make_scheduler(num_blocks=40, block_size=BLOCK_SIZE)
    oracle = PagedOracle(scheduler)
    group = scored_request(0, [i % 40 for i in range(10)], n=3)
    scheduler.add(group)
    oracle.run()
    check_scores(group[0])
    assert [each.prompt_scores for each in group[1:]] == [None, None]


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    scores = PromptScores(np.array([7], dtype=np.int32), num_top=2)
    assert scores.is_scheduled
    assert scores.is_complete
    assert list(positions(scores.message())) == []


def test_a_cancelled_step_leaves_those_of_others_alone() -> None:
    scheduler = make_scheduler(num_blocks=40, block_size=BLOCK_SIZE, max_num_batched_tokens=8)
    oracle = PagedOracle(scheduler)
    (first,) = scored_request(0, [i % 40 for i in range(8)], max_tokens=2)
    (second,) = scored_request(1, [i % 30 for i in range(20)])
    scheduler.add([first])
    launched = oracle.execute(scheduler.schedule())
    scheduler.add([second])
    uids = scheduler.cancel(scheduler.schedule())
    assert second.uid in uids
    for uid in uids - {first.uid}:
        scheduler.abort(uid)
    scheduler.update(launched)
    check_scores(first)
