"""Drafts that are right as far as a test wants."""

from collections.abc import Iterable, Sequence
from itertools import cycle

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.core.request import Request
from tests.factories.paged_oracle import VOCAB, expected_output


class Guesses:
    """Guesses of the tokens of `PagedOracle`: as many are right as `num_right` says, in turn."""

    def __init__(self, max_tokens: int, num_right: Sequence[int]) -> None:
        self.max_tokens = max_tokens
        self._num_right = cycle(num_right)

    def propose(self, request: Request, num_tokens: int) -> NDArray[np.int32]:
        guesses = np.array(expected_output(request.token_ids, num_tokens, request.index), np.int32)
        guesses[next(self._num_right) :] += 1
        return guesses % VOCAB


class KnownAnswers:
    """Guesses of the tokens that prompts are known to get; of three in a row, one is wrong."""

    def __init__(
        self, max_tokens: int, answers: Iterable[tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        self.max_tokens = max_tokens
        self._answers = {tuple(prompt): answer for prompt, answer in answers}

    def propose(self, request: Request, num_tokens: int) -> NDArray[np.int32]:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        start = request.num_output_tokens
        answer = np.array(self._answers[tuple(prompt)][start : start + num_tokens], np.int32)
        return np.where((start + np.arange(len(answer))) % 3 == 0, 1, answer).astype(np.int32)


def proposers() -> st.SearchStrategy[Guesses]:
    return st.builds(
        Guesses, st.integers(1, 11), st.lists(st.integers(0, 11), min_size=1, max_size=9)
    )
