"""Each token of a prompt is scored once, whatever happens to its sequence meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.prompt_scores import PromptScores
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.prompt_logprobs import logprobs_of, positions
from engine.token_ids import unpack_token_ids
from tests.factories.paged_oracle import PagedOracle, expected_output, expected_score
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
    expected = [expected_score(prompt[: place + 1]) for place in range(1, len(prompt))]
    assert logprobs_of(message).tolist() == expected
    for position, token_id, score in zip(positions(message), prompt[1:], expected, strict=True):
        assert position.token_ids == [token_id] * (1 + scores.num_top)
        assert position.logprobs == [score] * (1 + scores.num_top)
        assert position.ranks[1:] == list(range(1, scores.num_top + 1))


@dataclass(frozen=True)
class Arrival:
    step: int
    length: int
    which: int  # of few prompts, so that prefixes are shared
    num_top: int | None  # None: not scored
    max_tokens: int
    n: int
    priority: int
    abort: int | None


_ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        length=st.integers(1, 30),
        which=st.integers(0, 2),
        num_top=st.one_of(st.none(), st.integers(0, 3)),
        max_tokens=st.integers(1, 10),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        abort=st.one_of(st.none(), st.integers(0, 25)),
    ),
    min_size=1,
    max_size=8,
)


@given(
    arrivals=_ARRIVALS,
    num_blocks=st.integers(12, 40),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
    caching=st.booleans(),
    threshold=st.sampled_from([0, 5]),
    num_ahead=st.sampled_from([0, 1]),
    num_host_blocks=st.one_of(st.just(0), st.integers(1, 60)),
)
def test_in_any_company(
    arrivals: list[Arrival],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
    threshold: int,
    num_ahead: int,
    num_host_blocks: int,
) -> None:
    """Chunks, prefix hits, forks, preemptions, swaps, aborts, one step ahead: none is lost."""
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=threshold,
        policy="priority",
        num_host_blocks=num_host_blocks,
    )
    oracle = PagedOracle(scheduler, num_ahead)
    groups = []
    for uid, each in enumerate(arrivals):
        prompt = [each.which * 10 + i % 7 for i in range(each.length)]
        fields = {"max_tokens": each.max_tokens, "priority": each.priority}
        group = scored_request(uid, prompt, num_top=each.num_top or 0, n=each.n, **fields)
        if each.num_top is None:
            group[0].prompt_scores = None
        groups.append(group)
    for step in range(26):
        for uid, each in enumerate(arrivals):
            if each.step == step:
                scheduler.add(groups[uid])
            if each.abort == step and each.abort > each.step:
                scheduler.abort(uid)
        if oracle.has_work():
            oracle.step()
    oracle.run()
    for group, each in zip(groups, arrivals, strict=True):
        if group[0].finish_reason != "abort" and each.num_top is not None:
            check_scores(group[0])
        for request in group:
            if request.finish_reason != "abort":
                prompt = request.token_ids[: request.num_prompt_tokens].tolist()
                answer = expected_output(prompt, request.max_tokens, request.index)
                assert request.token_ids[request.num_prompt_tokens :].tolist() == answer


def run_until_computed(oracle: PagedOracle, request: Request, num_tokens: int) -> None:
    while request.num_computed_tokens < num_tokens:
        oracle.step()


def preempt(scheduler: Scheduler, request: Request) -> None:
    """Preempt `request`, the last of those that run."""
    assert scheduler.running.pop() is request
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
