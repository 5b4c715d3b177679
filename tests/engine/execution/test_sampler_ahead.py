"""The sampler from step to step: a host that is one token behind, slots that change hands."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.step.upload
from engine.core.constraints.bad_words import BadWords
from engine.core.request import Request
from engine.execution.sampler import Sampler
from tests.factories.requests import append_tokens, make_request
from tests.factories.sampling import admit, make_plan, make_tables, run_plan, sample_requests

VOCAB = 32
PENALISED = {"temperature": 0, "frequency_penalty": 0.3}


def falling() -> torch.Tensor:
    """Return a row that prefers 3, then 4 by 0.5 less, then 5, and no other."""
    row = torch.full((VOCAB,), -9.0)
    row[3:6] = torch.tensor([1.0, 0.5, 0.0])
    return row


def step(
    sampler: Sampler, requests: dict[int, Request], *, ahead: int = 0, idle: Sequence[int] = ()
) -> list[int]:
    """Return the tokens that requests in their slots get from `falling`; `idle` slots have none."""
    plan = make_plan(sampler, list(requests), list(requests.values()), ahead=ahead)
    slots = [-1 if slot in idle else slot for slot in requests]
    logits = falling().repeat(len(requests), 1)
    return [token.token_id for token in run_plan(sampler, plan, logits, slots)]


def test_penalties_count_tokens_that_the_host_has_not_seen() -> None:
    sampler, request = Sampler(make_tables(2), VOCAB), make_request(1, [8], **PENALISED)
    admit(sampler, 1, request)
    # Four plans before the first token is drawn.
    plans = [make_plan(sampler, [1], [request], ahead=ahead) for ahead in range(4)]
    drawn = [run_plan(sampler, plan, falling()[None], [1])[0].token_id for plan in plans]
    assert drawn == [3, 3, 4, 3]


def test_min_tokens_count_tokens_that_the_host_has_not_seen() -> None:
    request = make_request(1, [8], temperature=0, min_tokens=2, stop_token_ids=frozenset({3}))
    sampler = Sampler(make_tables(1), VOCAB)
    admit(sampler, 0, request)
    assert [step(sampler, {0: request}, ahead=ahead) for ahead in range(3)] == [[4], [4], [3]]


def test_draws_are_those_of_a_host_that_has_seen_all() -> None:
    request, logits = make_request(5, [8], max_tokens=9), torch.zeros(1, VOCAB)
    sampler = Sampler(make_tables(1), VOCAB)
    admit(sampler, 0, request)
    plans = [make_plan(sampler, [0], [request], ahead=ahead) for ahead in range(8)]
    ahead = [run_plan(sampler, plan, logits.clone(), [0])[0] for plan in plans]
    for token in ahead:
        assert sample_requests(logits.clone(), [request]) == [token]
        append_tokens(request, [token.token_id])
    assert len({token.token_id for token in ahead}) > 3


def test_bad_words_need_a_host_that_has_seen_all() -> None:
    sampler, request = Sampler(make_tables(1), VOCAB), make_request(1, [8], temperature=0)
    request.bad_words = BadWords([[3, 3], [4, 4]])
    admit(sampler, 0, request)
    for expected in (3, 4, 3, 4):
        assert step(sampler, {0: request}) == [expected]
        append_tokens(request, [expected])
    with pytest.raises(AssertionError):
        make_plan(sampler, [0], [request], ahead=1)


def test_a_preempted_sequence_with_bad_words_is_computed_again_in_pieces() -> None:
    sampler, request = Sampler(make_tables(1), VOCAB), make_request(1, [8], temperature=0)
    request.bad_words = BadWords([[3, 3]])
    append_tokens(request, [3, 4, 3])
    admit(sampler, 0, request)
    for ahead in (-3, -1):
        step(sampler, {0: request}, ahead=ahead, idle=[0])
    assert step(sampler, {0: request}) == [4]


def test_a_bad_word_is_not_begun_by_the_prompt() -> None:
    request = make_request(1, [9, 3], temperature=0)
    request.bad_words = BadWords([[3, 3], [9, 3, 4]])
    assert sample_requests(falling()[None], [request])[0].token_id == 3
    append_tokens(request, [3])
    request.bad_words = BadWords([[3, 3, 3], [3, 3]])
    assert sample_requests(falling()[None], [request])[0].token_id == 4


def test_a_slot_forgets_who_had_it() -> None:
    sampler = Sampler(make_tables(2), VOCAB)
    first = make_request(
        1, [8], **PENALISED, allowed_token_ids=[4, 5], logit_bias={5: 3.0}, repetition_penalty=1.5
    )
    admit(sampler, 0, first)
    assert [step(sampler, {0: first})[0] for _ in range(3)] == [5, 5, 5]
    for sampling in (PENALISED, {"temperature": 0}, PENALISED):
        other = make_request(2, [8], **sampling)
        admit(sampler, 0, other)
        assert step(sampler, {0: other}) == [3]


def test_the_last_of_several_new_requests_counts() -> None:
    sampler = Sampler(make_tables(1), VOCAB)
    said = make_request(1, [8], **PENALISED)
    append_tokens(said, [3, 3])
    for last, expected in ((make_request(2, [8], **PENALISED), 3), (said, 4)):
        for request in (said, make_request(3, [8], temperature=0), last):
            admit(sampler, 0, request)
        assert step(sampler, {0: last}) == [expected]
    admit(sampler, 0, said)
    plain = make_request(3, [8], temperature=0)
    admit(sampler, 0, plain)
    assert step(sampler, {0: plain}) == [3]


def test_an_idle_row_is_not_counted() -> None:
    sampler = Sampler(make_tables(3), VOCAB)
    requests = {slot: make_request(slot, [8], **PENALISED) for slot in (2, 0)}
    for slot, request in requests.items():
        admit(sampler, slot, request)
    step(sampler, requests)
    step(sampler, requests, idle=[2])
    assert step(sampler, requests) == [3, 4]


def test_a_preempted_sequence_comes_back_with_its_counts() -> None:
    sampler, request = Sampler(make_tables(2), VOCAB), make_request(1, [8], **PENALISED)
    admit(sampler, 0, request)
    assert step(sampler, {0: request}) == [3]
    append_tokens(request, [3])
    for slot in (0, 1, 1):  # its own, or another; nothing is counted twice
        admit(sampler, slot, request)
    assert step(sampler, {1: request}) == [3]
    assert step(sampler, {1: request}, ahead=1) == [4]


def test_new_requests_before_a_step_that_draws_nothing() -> None:
    sampler, request = Sampler(make_tables(1), VOCAB), make_request(1, [8], **PENALISED)
    append_tokens(request, [3, 3])
    admit(sampler, 0, request)
    assert run_plan(sampler, make_plan(sampler, [], []), torch.zeros(0, VOCAB), []) == []
    assert step(sampler, {0: request}) == [4]


def test_a_step_uploads_nothing_that_the_tables_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def upload(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
        sizes.append(values.nbytes)
        return torch.from_numpy(values).to(device)

    monkeypatch.setattr(kernels.step.upload, "upload", upload)
    lists = {"allowed_token_ids": range(1000), "logit_bias": dict.fromkeys(range(1000), 1.0)}
    stops = {"min_tokens": 4, "stop_token_ids": frozenset({1})}
    sampler = Sampler(make_tables(1, vocab_size=1000), 1000)
    for wishes in ({}, {"logprobs": 1}, {"bad_words": [[3]]}):
        bad_words = wishes.pop("bad_words", ())
        request = make_request(1, [8], **PENALISED, **lists, **stops, **wishes)
        request.bad_words = BadWords(bad_words) if bad_words else None
        admit(sampler, 0, request)
        run_plan(sampler, make_plan(sampler, [0], [request]), torch.zeros(1, 1000), [0])
    assert sizes == [4 * 4, 4 * (4 + 32)], "a row; a mask, and whose it is"


WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 3, "min_p": 0.1},
    {"repetition_penalty": 1.4, "logprobs": 2},
    {"presence_penalty": 1.0, "frequency_penalty": -0.5},
    {"allowed_token_ids": [1, 5, 6, 30], "temperature": 0},
    {"logit_bias": {4: 3.0, 9: -2.0}, "logprobs": 0},
    {"min_tokens": 6, "stop_token_ids": frozenset({0, 1, 2, 3})},
    {"bad_words": [[5], [6, 7], [7]], "logprobs": VOCAB + 1},
]


def wishing(uid: int, output: Sequence[int]) -> Request:
    """Return a request with the wishes of its number."""
    sampling = dict(WISHES[uid])
    bad_words = sampling.pop("bad_words", ())
    request = make_request(uid, [1, 2, 3], max_tokens=20, **sampling)
    request.bad_words = BadWords(bad_words) if bad_words else None
    append_tokens(request, output)
    return request


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_depends_neither_on_its_company_nor_on_its_slot(data: st.DataObject) -> None:
    uids = data.draw(st.lists(st.integers(0, len(WISHES) - 1), unique=True, min_size=1))
    slots = data.draw(st.permutations(range(len(WISHES))))[: len(uids)]
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)
    requests = [wishing(uid, data.draw(tokens)) for uid in uids]
    logits = torch.randn(len(uids), VOCAB, generator=torch.Generator().manual_seed(sum(uids))) * 3

    sampler = Sampler(make_tables(len(WISHES)), VOCAB)
    for slot, request in zip(slots, requests, strict=True):
        admit(sampler, slot, request)
    plan = make_plan(sampler, slots, requests)
    together = run_plan(sampler, plan, logits.clone(), slots)
    alone = [
        sample_requests(row[None].clone(), [request])[0]
        for row, request in zip(logits, requests, strict=True)
    ]
    assert together == alone


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_are_applied_in_steps_that_have_some(filters: dict[str, float]) -> None:
    """Kernels are launched for them; a greedy row takes the maximum in any case."""
    plain = make_request(1, [8], temperature=1)
    greedy = make_request(2, [8], temperature=0, **filters)
    filtered = make_request(3, [8], temperature=1, **filters)
    sampler = Sampler(make_tables(3), VOCAB)
    for slot, request in enumerate((plain, greedy, filtered)):
        admit(sampler, slot, request)
    assert not make_plan(sampler, [0, 1], [plain, greedy]).has_filters
    assert make_plan(sampler, [0, 2], [plain, filtered]).has_filters
