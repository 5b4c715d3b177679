"""A beam search chooses as transformers' `generate` does, on a model that is a table."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from engine.core.beams.beam_search import BeamSearch, BeamToken, EarlyStopping
from engine.protocol.messages import TokenLogprobs

VOCAB = 12
FIRST = VOCAB  # the prompt
MAX_TOKENS = 8


class Table(PreTrainedModel, GenerationMixin):
    """The logits of the next token depend on the last one, and on how many there are.

    By the last one alone, two outputs with the same steps in another order would be equally good.
    """

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, seed: int) -> None:
        super().__init__(PretrainedConfig(vocab_size=VOCAB + 1, use_cache=False))
        draw = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(MAX_TOKENS, VOCAB + 1, VOCAB + 1, generator=draw)
        logits[..., FIRST] = -torch.inf
        self.logits = torch.nn.Parameter(logits, requires_grad=False)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        positions = torch.arange(input_ids.shape[1])
        return CausalLMOutput(logits=self.logits[positions, input_ids])  # type: ignore[arg-type]

    def candidates(
        self, position: int, last: int, count: int, forbidden: set[int]
    ) -> TokenLogprobs:
        scores = self.logits[position, last].log_softmax(-1)
        scores[list(forbidden)] = -torch.inf
        top = scores.topk(count)
        ranks = [1, *range(1, count + 1)]
        return TokenLogprobs([0, *top.indices.tolist()], [0.0, *top.values.tolist()], ranks)


def common(found: BeamSearch) -> BeamToken:
    """Return the last token that the live beams and the best hypothesis share, by their paths."""
    ends = {*found.live, *(each.last for each in found.finished[:1])}
    while len(ends) > 1:
        longest = max(token.length for token in ends)
        ends = {(token.length == longest and token.parent) or token for token in ends}
    return ends.pop() if ends else found.settled


def search(table: Table, width: int, *, min_tokens: int = 0, **rules: Any) -> BeamSearch:
    """Search until it is over; whatever is settled must stay."""
    found = BeamSearch(width, min_tokens=min_tokens, num_logprobs=0, **rules)
    settled: list[int] = []
    while not found.is_over:
        position = found.live[0].length
        forbidden = set(rules["stop_token_ids"]) if position < min_tokens else set()
        count = min(found.num_candidates, VOCAB)
        lasts = [beam.token_id if beam.parent else FIRST for beam in found.live]
        parents = found.advance(
            [table.candidates(position, last, count, forbidden) for last in lasts]
        )
        assert len(parents) == len(found.live)
        settled = [token.token_id for token in found.settled.path()]
        assert found.settled is common(found)
        for beam in found.live:
            assert [token.token_id for token in beam.path()][: len(settled)] == settled
    best = [token.token_id for token in found.finished[0].last.path()]
    assert best[: len(settled)] == settled
    return found


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    width=st.integers(2, 6),
    max_tokens=st.integers(1, MAX_TOKENS),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=4),
    length_penalty=st.sampled_from([-1.5, 0.0, 0.7, 1.0, 3.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    min_tokens=st.integers(0, 3),
)
def test_hypotheses_and_scores_are_those_of_transformers(
    seed: int,
    width: int,
    max_tokens: int,
    stops: set[int],
    length_penalty: float,
    early_stopping: EarlyStopping,
    min_tokens: int,
) -> None:
    table, min_tokens = Table(seed), min(min_tokens, max_tokens)
    expected: Any = table.generate(
        torch.tensor([[FIRST]]),
        GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            min_new_tokens=min_tokens,
            eos_token_id=sorted(stops) or None,
            pad_token_id=FIRST,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            use_cache=False,
            output_scores=True,
            return_dict_in_generate=True,
        ),
    )
    found = search(
        table,
        width,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stops,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    rows = [[i for i in row if i != FIRST] for row in expected.sequences[:, 1:].tolist()]
    assert [[token.token_id for token in each.last.path()] for each in found.finished] == rows
    scores = [each.score for each in found.finished]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), rel=1e-5)
    for each in found.finished:
        assert each.stops == (each.last.token_id in stops and each.last.length > min_tokens)
        own = [token.logprobs.logprobs[0] for token in each.last.path() if token.logprobs]
        assert sum(own) == pytest.approx(float(each.last.score), rel=1e-5)


@given(seed=st.integers(0, 2**31), max_tokens=st.integers(1, 3))
@settings(max_examples=10)
def test_with_enough_beams_the_best_of_all_outputs_is_found(seed: int, max_tokens: int) -> None:
    table = Table(seed)
    logprobs = table.logits.log_softmax(-1).double().numpy()
    best = {(): 0.0}
    for position in range(max_tokens):
        best = {
            (*tokens, token): score + logprobs[position, tokens[-1] if tokens else FIRST, token]
            for tokens, score in best.items()
            for token in range(VOCAB)
        }
    found = search(
        table, 2 * VOCAB**2, max_tokens=max_tokens, stop_token_ids=(), early_stopping="never"
    )
    assert tuple(t.token_id for t in found.finished[0].last.path()) == max(
        best, key=best.__getitem__
    )


@pytest.mark.parametrize("nothing", [-np.inf, np.nan])
def test_a_search_without_any_possible_token_is_over(nothing: float) -> None:
    found = BeamSearch(2, max_tokens=5)
    found.advance([TokenLogprobs([0, 3, 4], [0.0, -1.0, -2.0], [1, 1, 2])])
    assert [beam.token_id for beam in found.live] == [3, 4]
    found.advance([TokenLogprobs([0, 3, 4], [0.0, nothing, nothing], [1, 1, 2])] * 2)
    assert found.is_over
    assert not found.finished


def test_a_tree_of_many_tokens_is_freed_without_recursion() -> None:
    found = BeamSearch(1, max_tokens=60_000)
    for _ in range(50_000):
        found.advance([TokenLogprobs([0, 3], [0.0, -1.0], [1, 1])])
    del found


def test_advance_costs_the_same_however_long_the_beams_are() -> None:
    """Beams that share nothing: their paths were compared up to the prompt, 10 ms at 4,000."""
    width, costs = 16, []
    found = BeamSearch(width, max_tokens=10_000)
    for _ in range(4_000):
        # The first token divides the beams, and each then goes on with its own.
        likely = -1.0 if found.live[0].parent is None else -50.0
        candidates = TokenLogprobs([0, *range(20)], [0.0, -0.01, *[likely] * 19], [1] * 21)
        began = time.process_time()
        found.advance([candidates] * len(found.live))
        costs.append(time.process_time() - began)
    assert len(found.live) == width
    assert found.settled.length == 0
    assert np.median(costs[-200:]) < 4 * np.median(costs[50:250])
