import math
from collections import Counter

import pytest
import torch

from engine.core.constraints.bad_words import BadWords
from engine.core.request import Request
from tests.factories.requests import append_tokens, make_request
from tests.factories.sampling import sample_requests

VOCAB = 32


def logits_of(probabilities: list[float]) -> torch.Tensor:
    row = torch.full((VOCAB,), -torch.inf)
    row[: len(probabilities)] = torch.tensor(probabilities).log()
    return row


def draw(row: torch.Tensor, count: int = 4000, **sampling: object) -> Counter[int]:
    requests = [make_request(uid, [1], **sampling) for uid in range(count)]
    return Counter(s.token_id for s in sample_requests(row.repeat(count, 1), requests))


def choose(row: torch.Tensor, request: Request) -> int:
    return sample_requests(row.clone()[None], [request])[0].token_id


def output(request: Request, *token_ids: int) -> Request:
    append_tokens(request, token_ids)
    return request


def test_temperature_zero_takes_the_most_likely() -> None:
    assert draw(logits_of([0.2, 0.5, 0.3]), 10, temperature=0) == {1: 10}


def test_samples_follow_the_distribution() -> None:
    counts = draw(logits_of([0.1, 0.6, 0.3]))
    for token_id, p in enumerate([0.1, 0.6, 0.3]):
        # Five standard deviations of a binomial.
        assert counts[token_id] == pytest.approx(4000 * p, abs=5 * math.sqrt(4000 * p * (1 - p)))
    assert sum(counts.values()) == 4000
    assert set(counts) == {0, 1, 2}


def test_temperature_sharpens() -> None:
    counts = draw(logits_of([0.4, 0.6]), temperature=0.5)
    p = 0.6**2 / (0.6**2 + 0.4**2)
    assert counts[1] == pytest.approx(4000 * p, abs=5 * math.sqrt(4000 * p * (1 - p)))


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert draw(logits_of([0.4, 0.6]), 10, temperature=1e-30) == {1: 10}


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.35}, {0, 1}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"top_n_sigma": 1.0}, {0, 1}),
        ({"typical_p": 0.29}, {1}),
        ({"typical_p": 0.31}, {0, 1}),
        ({"typical_p": 0.31, "top_k": 1}, {0}),
        ({"allowed_token_ids": [2, 3]}, {2, 3}),
        ({"logit_bias": {0: -100.0}}, {1, 2, 3}),
    ],
)
def test_filters_keep_exactly(sampling: dict[str, object], kept: set[int]) -> None:
    assert set(draw(logits_of([0.5, 0.3, 0.15, 0.05]), **sampling)) == kept


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, VOCAB)
    requests = [
        make_request(uid, [1, 2], top_p=0.3 + 0.015 * uid, top_k=uid % 5, temperature=uid % 3)
        if uid % 2
        else make_request(uid, [1, 2])  # not filtered at all
        for uid in range(40)
    ]
    together = [s.token_id for s in sample_requests(logits.clone(), requests)]
    alone = [choose(logits[i], request) for i, request in enumerate(requests)]
    assert together == alone


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-300},
        {"temperature": 5e-324, "top_p": 0.5},
        {"temperature": 1e300},
        {"top_k": 2**31 - 1},
        {"top_n_sigma": 1e300},
        {"top_n_sigma": 1e-300, "typical_p": 1e-300},
        {"top_p": 1e-300, "min_p": 1},
        {"logit_bias": {5: 100.0, 6: -100.0}},
        {"logit_bias": dict.fromkeys(range(VOCAB), -100.0)},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_extreme_values_still_give_a_token(sampling: dict[str, object], temperature: int) -> None:
    torch.manual_seed(0)
    for uid in range(20):
        request = make_request(uid, [1, 2, 3], **{"temperature": temperature, **sampling})
        row = torch.randn(VOCAB)
        row[:2] = 0.0
        assert 0 <= choose(row, request) < VOCAB


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e300},
        {"top_n_sigma": 1e39},
        {"top_n_sigma": 1e-60},
        {"typical_p": 1e-60},
        {"top_p": 1e-60},
        {"min_p": 1e-60},
        {"repetition_penalty": 1e39},
        {"repetition_penalty": 1e-60},
    ],
)
@pytest.mark.parametrize("logit", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_extreme_values_give_no_token_that_is_not_allowed(
    sampling: dict[str, object], logit: float, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr("kernels.cpu.operations", lambda tensor: None)
    request = make_request(1, [3], **{"temperature": 1, "allowed_token_ids": [3], **sampling})
    row = torch.randn(VOCAB)
    row[3] = logit
    assert choose(row, request) == 3


@pytest.mark.parametrize("temperature", [0, 1])
def test_what_would_forbid_every_token_is_void(temperature: int) -> None:
    sampling = {"temperature": temperature, "allowed_token_ids": [3], "min_tokens": 3}
    request = make_request(1, [8], stop_token_ids=frozenset({3}), **sampling)
    request.bad_words = BadWords([[3]])
    assert choose(torch.randn(VOCAB), request) == 3


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_that_computes_nan_still_gives_a_token(temperature: int) -> None:
    request = make_request(1, [8], temperature=temperature)
    assert 0 <= choose(torch.full((VOCAB,), torch.nan), request) < VOCAB


def test_the_seed_decides_and_each_position_draws_anew() -> None:
    row = torch.zeros(VOCAB)
    same = [choose(row, make_request(7, [1])) for _ in range(3)]
    assert len(set(same)) == 1
    positions = {choose(row, output(make_request(7, [1]), *([0] * n))) for n in range(20)}
    assert len(positions) > 5


def test_min_tokens_forbids_the_end() -> None:
    row = logits_of([0.9, 0.1])
    request = make_request(1, [5], temperature=0, min_tokens=2, stop_token_ids=frozenset({0}))
    assert choose(row, request) == 1
    assert choose(row, output(request, 1)) == 1
    assert choose(row, output(request, 1)) == 0


def test_repetition_penalty_as_in_the_paper() -> None:
    row = torch.zeros(VOCAB)
    row[3], row[4] = 2.0, 1.5
    row[5:] = -1.0
    assert choose(row, make_request(1, [3], temperature=0, repetition_penalty=1.5)) == 4
    row[3] = -0.1  # negative logits are pushed further down
    assert choose(row.where(row < 0, -0.15), make_request(1, [3], temperature=0)) == 3
    penalised = make_request(1, [3], temperature=0, repetition_penalty=2.0)
    assert choose(row.where(row < 0, -0.15), penalised) != 3


def test_presence_and_frequency_look_at_the_output_only() -> None:
    row = torch.zeros(VOCAB)
    row[3], row[4] = 1.0, 0.5
    presence = {"temperature": 0, "presence_penalty": 0.6}
    frequency = {"temperature": 0, "frequency_penalty": 0.3}
    assert choose(row, make_request(1, [3], **presence)) == 3
    assert choose(row, output(make_request(1, [9], **presence), 3)) == 4
    assert choose(row, output(make_request(1, [9], **frequency), 3)) == 3
    assert choose(row, output(make_request(1, [9], **frequency), 3, 3)) == 4


def test_bad_words_are_sequences_of_the_output() -> None:
    row = torch.zeros(VOCAB)
    row[3], row[4] = 2.0, 1.0
    request = make_request(1, [8], temperature=0)
    request.bad_words = BadWords([[7, 3]])
    assert choose(row, request) == 3
    assert choose(row, output(request, 7)) == 4
    single = make_request(1, [8], temperature=0)
    single.bad_words = BadWords([[3]])
    assert choose(row, single) == 4


def test_logprobs_are_raw_and_ranked() -> None:
    row = logits_of([0.2, 0.5, 0.3])
    request = make_request(
        1, [9], temperature=0, logprobs=2, logit_bias={0: 10.0}, repetition_penalty=2.0
    )
    plain = make_request(2, [9], temperature=0)
    with_logprobs, without = sample_requests(torch.stack([row, row]), [request, plain])
    assert without.logprobs is None
    assert with_logprobs.token_id == 0
    assert with_logprobs.logprobs is not None
    assert with_logprobs.logprobs.token_ids == [0, 1, 2]
    assert with_logprobs.logprobs.ranks == [3, 1, 2]
    assert with_logprobs.logprobs.logprobs == pytest.approx(
        [math.log(0.2), math.log(0.5), math.log(0.3)]
    )
