"""Transformers' log-probabilities of prompts, and whether an engine's are these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from engine import RequestOutput
from engine.offline.outputs import Logprob
from tests.factories.exact import ExactModel, decoded_logits, max_error


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt of P tokens.

    Attributes:
        logprobs: float64 [P - 1, V], of what follows each token but the last.
        max_error: bound on a float32 log-probability's error, from that of transformers' model.
    """

    token_ids: list[int]
    logprobs: Tensor
    max_error: float


class PromptReference:
    """Transformers' `model` in float32, and in float64."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._exact = ExactModel(model)

    def score(self, token_ids: list[int]) -> ScoredPrompt:
        theirs = decoded_logits(self._model, token_ids, len(token_ids)).log_softmax(dim=-1)
        exact = self._exact.logits(token_ids, len(token_ids)).log_softmax(dim=-1)
        return ScoredPrompt(token_ids, exact[:-1], max_error(theirs, exact))


def check_prompts(
    outputs: Sequence[RequestOutput], prompts: Sequence[ScoredPrompt], num_top: int
) -> None:
    """Assert that `outputs` have the log-probabilities of `prompts`; ties may be in any order."""
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        assert len(others) == len(prompt.token_ids) - 1
        positions = zip(prompt.token_ids[1:], others, prompt.logprobs, strict=True)
        for token_id, found, expected in positions:
            assert found is not None
            _check_position(found, token_id, expected, prompt.max_error, num_top)


def _check_position(
    found: dict[int, Logprob], token_id: int, expected: Tensor, max_error: float, num_top: int
) -> None:
    assert next(iter(found)) == token_id
    for each, entry in found.items():
        assert abs(entry.logprob - float(expected[each])) <= max_error
        num_larger = int((expected > expected[each] + 2 * max_error).sum())
        num_not_smaller = int((expected > expected[each] - 2 * max_error).sum())
        assert num_larger < entry.rank <= num_not_smaller
    ranks = sorted(entry.rank for entry in found.values() if entry.rank <= num_top)
    assert ranks == list(range(1, num_top + 1))
    assert len(found) == num_top + (found[token_id].rank > num_top)
