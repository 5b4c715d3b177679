"""Each sampler draws from its exact distribution: chi-square tests on the path of the engine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.core.constraints.dry import Dry, DryArgs
from engine.core.constraints.processors import AskedProcessor
from engine.core.request import Request
from engine.logits_processors import ProcessorRow
from kernels import cpu
from tests.factories.requests import append_tokens, make_request
from tests.factories.sampling import sample_requests

VOCAB, COUNT = 32, 2000
PROMPT, OUTPUT = [3, 4, 5, 3], [4, 6, 3, 4]
DRY = DryArgs(multiplier=0.7, base=1.5, allowed_length=1, last_n=1000, breakers=())
DRY_PROCESSOR = Dry(str)

Logits = NDArray[np.float64]


def most_likely(logits: Logits, kept: int) -> NDArray[np.bool_]:
    return logits >= np.sort(logits)[-kept]


def probabilities(logits: Logits) -> Logits:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def exact(logits: Logits, sampling: dict[str, Any]) -> Logits:
    """Return the distribution that a request asks for, by the definitions of its fields."""
    x = logits.copy()
    seen, said = [*{*PROMPT, *OUTPUT}], np.bincount(OUTPUT, minlength=VOCAB)
    for token, bias in sampling.get("logit_bias", {}).items():
        x[token] += bias
    penalty = sampling.get("repetition_penalty", 1.0)
    x[seen] = np.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    x -= sampling.get("frequency_penalty", 0.0) * said
    x -= sampling.get("presence_penalty", 0.0) * (said > 0)
    if "dry_multiplier" in sampling:
        # The sequence is 3 4 5 3 4 6 3 4, and 3 4 came twice: 5 and 6 followed it.
        x[[5, 6]] -= DRY.multiplier * DRY.base
    if "allowed_token_ids" in sampling:
        x[~np.isin(np.arange(VOCAB), sampling["allowed_token_ids"])] = -np.inf
    x /= sampling.get("temperature", 1.0)
    if "top_n_sigma" in sampling:
        x[x < x.max() - sampling["top_n_sigma"] * x[x > -np.inf].std()] = -np.inf
    if "typical_p" in sampling:
        p = probabilities(x)
        information = np.where(p > 0, -np.log(p, where=p > 0), np.inf)
        entropy = (p * np.where(p > 0, information, 0)).sum()
        order = np.argsort(abs(information - entropy))
        kept = int((np.cumsum(p[order]) < sampling["typical_p"]).sum()) + 1
        x[order[kept:]] = -np.inf
    if "top_k" in sampling:
        x[~most_likely(x, sampling["top_k"])] = -np.inf
    if "min_p" in sampling:
        p = probabilities(x)
        x[p < sampling["min_p"] * p.max()] = -np.inf
    if "top_p" in sampling:
        p = probabilities(x)
        order = np.argsort(-p)
        kept = int((np.cumsum(p[order]) < sampling["top_p"]).sum()) + 1
        x[order[kept:]] = -np.inf
    return probabilities(x)


SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.15},
    {"typical_p": 0.6},
    {"top_n_sigma": 1.2},
    {"logit_bias": {3: 2.0, 9: -1.5}},
    {"repetition_penalty": 1.6},
    {"presence_penalty": 1.1},
    {"frequency_penalty": 0.8},
    {"dry_multiplier": DRY.multiplier},
    {"allowed_token_ids": [1, 2, 3, 4, 5, 20, 31]},
    {
        "temperature": 1.3,
        "top_n_sigma": 2.0,
        "typical_p": 0.95,
        "top_k": 12,
        "min_p": 0.02,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "dry_multiplier": DRY.multiplier,
        "logit_bias": {4: 1.0},
    },
]


def request(uid: int, sampling: dict[str, Any]) -> Request:
    fields = {name: value for name, value in sampling.items() if not name.startswith("dry_")}
    made = make_request(uid, PROMPT, max_tokens=20, **fields)
    append_tokens(made, OUTPUT)
    if "dry_multiplier" in sampling:
        row = ProcessorRow(DRY)
        made.processors = [AskedProcessor("dry_multiplier", DRY_PROCESSOR, row)]
    return made


@pytest.mark.parametrize("sampling", SAMPLERS, ids=lambda sampling: "-".join(sampling) or "plain")
def test_draws_follow_the_exact_probabilities(sampling: dict[str, Any]) -> None:
    if cpu.operations(torch.zeros(())) is None:
        pytest.skip("there are no CPU kernels: python -m kernels.cpu builds them")
    check_draws(sampling)


@pytest.mark.parametrize("sampling", [{"typical_p": 0.6}, SAMPLERS[-1]], ids="-".join)
def test_draws_without_the_kernels_do_too(
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "operations", lambda tensor: None)
    check_draws(sampling)


def check_draws(sampling: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
    expected = exact(logits.double().numpy(), sampling) * COUNT
    requests = [request(uid, sampling) for uid in range(COUNT)]
    drawn = sample_requests(logits.repeat(COUNT, 1), requests)
    counts = np.bincount([token.token_id for token in drawn], minlength=VOCAB)
    assert not counts[expected == 0].any()
    # Tokens that hardly ever come are counted together.
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    # By Wilson and Hilferty, one correct sampler in 10^4 exceeds it.
    freedom = max(len(observed) - 1, 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit
