"""The engine's sampler on our kernels equals its CPU form where nothing is random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine.core.constraints.bad_words import BadWords
from engine.core.constraints.processors import AskedProcessor
from engine.core.request import Request
from engine.execution.downloads import Downloads
from engine.execution.pending_step import PendingStep
from engine.execution.sampler import Sampler
from engine.logits_processors import Adjustment, ProcessorRow
from kernels import device
from tests.factories.requests import append_tokens, make_request
from tests.factories.sampling import (
    SampledToken,
    admit,
    make_plan,
    make_tables,
    run_plan,
    sample_requests,
)
from tests.kernels.no_waiting import no_waiting
from tests.kernels.support import DEVICE, randn

VOCAB = 101

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 3},
    "no-top-logprobs": {"logprobs": 0},
    "all-logprobs": {"logprobs": VOCAB + 5},
    "repetition": {"repetition_penalty": 1.7, "logprobs": 1},
    "presence-and-frequency": {"presence_penalty": 1.1, "frequency_penalty": -0.4},
    "bias": {"logit_bias": {90: 3.5, 7: -2.0, 8: 4.0}},
    "all-but-one-forbidden": {"logit_bias": {i: -100.0 for i in range(VOCAB) if i != 55}},
    "allowed": {"allowed_token_ids": (3, 4, 99), "logprobs": 2},
    "min-tokens": {"min_tokens": 9, "logit_bias": {2: 60.0}},
    "cold": {"temperature": 1e-300},
    "top-k-1": {"temperature": 1.5, "top_k": 1},
    "small-top-p": {"temperature": 0.7, "top_p": 1e-9},
    "min-p-1": {"temperature": 1.1, "min_p": 1.0},
    "few-sigmas": {"temperature": 1.1, "top_n_sigma": 1e-6, "logprobs": 2},
    "one-typical": {"temperature": 0.9, "typical_p": 1e-9, "presence_penalty": 0.5},
}


class _Fixed:
    """A logits processor that always adds the same."""

    def __init__(self, answer: Adjustment) -> None:
        self.answer = answer

    def validate(self, args: Mapping[str, Any]) -> None: ...

    def adjust(self, rows: Sequence[ProcessorRow]) -> Sequence[Adjustment]:
        return [self.answer] * len(rows)


def _requests() -> list[Request]:
    """Return one of each kind; the host takes part in some."""
    requests = [_request(10 + i, sampling) for i, sampling in enumerate(SAMPLING.values())]
    requests[0].bad_words = BadWords([[90, 17], [3]])
    few = _Fixed(([7, 100, 3], [9.0, 8.5, -np.inf]))
    rest = _Fixed(np.linspace(-9, 9, VOCAB))
    large = _Fixed(([3], [-1e308]))
    for request, asked in (
        (requests[1], [few]),
        (requests[4], [rest, few]),
        (requests[5], [large]),
    ):
        request.processors = [AskedProcessor("x", each, ProcessorRow({})) for each in asked]
    return requests


def _request(uid: int, sampling: dict[str, Any]) -> Request:
    request = make_request(
        uid,
        [5, 6, 100, 6],
        max_tokens=20,
        stop_token_ids=frozenset({2}),
        **{"temperature": 0, **sampling},
    )
    append_tokens(request, [uid, 6, uid, 90])
    return request


def _ranked(token: SampledToken) -> tuple[list[int], list[int]]:
    assert token.logprobs is not None
    return token.logprobs.token_ids, token.logprobs.ranks


def test_all_kinds_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _requests()
    logits = randn(len(requests), VOCAB) * 3
    # As from a head that is padded; its padding tokens would be the most likely ones.
    padded = torch.full((len(requests), 128), 1e9, device=DEVICE)
    padded[:, :VOCAB] = logits
    found = sample_requests(padded[:, :VOCAB], requests)
    monkeypatch.setattr(device, "has_triton", lambda where: False)
    expected = sample_requests(logits.cpu(), requests)
    for name, one, other in zip(SAMPLING, found, expected, strict=True):
        assert one.token_id == other.token_id, name
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5), name
        assert (one.logprobs is None) == (other.logprobs is None), name
        if one.logprobs is not None and other.logprobs is not None:
            assert _ranked(one) == _ranked(other), name
            assert one.logprobs.logprobs == pytest.approx(other.logprobs.logprobs, abs=1e-5), name


def test_draws_do_not_depend_on_the_batch_and_follow_the_seed() -> None:
    settings = [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 2.0}] * 2
    requests = [_request(i, sampling) for i, sampling in enumerate(settings)]
    logits = randn(len(requests), VOCAB, seed=3)
    together = [token.token_id for token in sample_requests(logits.clone(), requests)]
    alone = [
        sample_requests(row[None].clone(), [request])[0].token_id
        for row, request in zip(logits, requests, strict=True)
    ]
    assert together == alone
    same = [_request(1, {"temperature": 1.0}) for _ in range(3)]
    row = torch.zeros(3, VOCAB, device=logits.device)
    assert len({token.token_id for token in sample_requests(row, same)}) == 1
    different = [_request(i, {"temperature": 1.0}) for i in range(8)]
    row = torch.zeros(8, VOCAB, device=logits.device)
    assert len({token.token_id for token in sample_requests(row, different)}) > 3


def _serve(steps: int, device: torch.device = DEVICE) -> list[list[SampledToken]]:
    """Return the tokens of steps that were all planned before the first was sampled."""
    kinds = [
        {"repetition_penalty": 1.5, "logprobs": 2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"frequency_penalty": 1.2, "min_tokens": 6, "logit_bias": {2: 9.0, 90: 2.0}},
        {"allowed_token_ids": (3, 4, 99), "frequency_penalty": 1.0},
        {},
    ]
    requests = [_request(10 + i, sampling) for i, sampling in enumerate(kinds)]
    sampler = Sampler(make_tables(len(kinds) + 1, vocab_size=VOCAB, device=device), VOCAB)
    slots = [4, 0, 5, 1, 3]
    for slot, request in zip(slots, requests, strict=True):
        admit(sampler, slot, request)
    plans = [make_plan(sampler, slots, requests, ahead=ahead) for ahead in range(steps)]
    row = (randn(1, VOCAB) * 2).to(device)
    # The second sequence ends at the third step, but this test schedules it again.
    live = [[-1 if i == 2 and slot == 0 else slot for slot in slots] for i in range(steps)]
    return [
        run_plan(sampler, plan, row.repeat(len(kinds), 1), where)
        for plan, where in zip(plans, live, strict=True)
    ]


def test_steps_ahead_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _serve(6)
    monkeypatch.setattr(device, "has_triton", lambda where: False)
    for one, other in zip(found, _serve(6, torch.device("cpu")), strict=True):
        assert [token.token_id for token in one] == [token.token_id for token in other]
    # Penalties have changed all rows that have any, and no other.
    different = [len({step[row].token_id for step in found}) for row in range(5)]
    assert min(different[:4]) > 1
    assert different[4] == 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device() -> None:
    requests = _requests()
    sampler, slots = (
        Sampler(make_tables(len(requests), vocab_size=VOCAB, device=DEVICE), VOCAB),
        list(range(len(requests))),
    )
    for slot, request in zip(slots, requests, strict=True):
        admit(sampler, slot, request)
    where = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    logits, downloads = randn(len(requests), VOCAB), Downloads(DEVICE)
    for _ in range(2):
        plan = make_plan(sampler, slots, requests)
        with no_waiting():
            drawn = sampler.sample(plan, logits, where)
            sent = PendingStep.of(plan, drawn, where, downloads)
        assert len(sent.wait().token_ids) == len(requests)
