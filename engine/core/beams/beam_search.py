"""BeamSearch: beam search for one prompt, which chooses the beams to keep and ends the search.

The rules are those of `generate` in transformers 5 without sampling (`GenerationMixin._beam_search`
in its `generation/utils.py`). Pure: it knows tokens and log-probabilities, no engine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from engine.protocol.messages import TokenLogprobs

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, eq=False)
class BeamToken:
    """A token of the tree of continuations; those of a beam are found from its last one.

    Attributes:
        parent: the token before it; None of the root, which stands for the prompt.
        score: float32 sum of the log-probabilities from the root on.
        length: number of tokens from the root on.
        logprobs: those of the token and of the most likely ones at its position.
    """

    parent: BeamToken | None
    token_id: int
    score: np.float32
    length: int
    logprobs: TokenLogprobs | None

    def path(self, start: int = 0) -> list[BeamToken]:
        """Return the tokens from the root on, without the root and the first `start` ones."""
        found: list[BeamToken] = []
        token = self
        while token.parent is not None and token.length > start:
            found.append(token)
            token = token.parent
        return found[::-1]


class Hypothesis(NamedTuple):
    """A beam that has ended.

    Attributes:
        last: its last token.
        score: sum of its log-probabilities, divided by its length to the power of `length_penalty`.
        stops: whether a stop token has ended it; else its length.
    """

    last: BeamToken
    score: float
    stops: bool


class BeamSearch:
    """The search for the `width` most likely outputs of one prompt.

    Attributes:
        live: the last tokens of the beams that go on, the most likely first; at first the root.
        finished: the best hypotheses so far, at most `width`, the best first.
        settled: the last token that the best output has in any case.
    """

    def __init__(
        self,
        width: int,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        num_logprobs: int | None = None,
    ) -> None:
        """Search for outputs of up to `max_tokens` tokens.

        Args:
            min_tokens: output tokens before which stop tokens do not stop.
            early_stopping: True ends the search when there are `width` hypotheses, False when
                those that could come from the best beam now are no better, "never" when none that
                could ever come from it is.
            num_logprobs: how many most likely tokens to keep at each position; None: none.
        """
        self.width = width
        self.live = [BeamToken(None, -1, np.float32(0), 0, None)]
        self.finished: list[Hypothesis] = []
        self.settled = self.live[0]
        # Of the tokens from `settled` on, those that follow in a live beam or the best hypothesis.
        self._children: dict[BeamToken, set[BeamToken]] = {}
        self._ends = {self.live[0]}  # the last tokens of these
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_logprobs = num_logprobs

    @property
    def num_candidates(self) -> int:
        """Most likely tokens of each beam that can matter: `width` beside all stop tokens."""
        return max(self.width + len(self._stop_token_ids), self._num_logprobs or 0)

    @property
    def is_over(self) -> bool:
        """Whether `finished` does not change any more."""
        if not self.live:
            return True
        if len(self.finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        best, length = self.live[0], self.live[0].length
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        return self._normalized(best.score, length) <= self.finished[-1].score

    def advance(self, candidates: Sequence[TokenLogprobs]) -> list[int]:
        """Choose the next token of all beams.

        Args:
            candidates: of each beam in `live`, its `num_candidates` most likely tokens, from the
                second entry on.

        Returns:
            Which of the beams that were in `live` each one in it now continues.
        """
        scores = np.array([each.logprobs[1:] for each in candidates], dtype=np.float32)
        scores += np.array([[beam.score] for beam in self.live], dtype=np.float32)
        is_last = self.live[0].length + 1 == self._max_tokens
        live: list[BeamToken] = []
        parents: list[int] = []
        for rank, flat_index in enumerate(np.argsort(-scores, axis=None, kind="stable").tolist()):
            may_finish = rank < self.width
            if not may_finish and (is_last or len(live) == self.width):
                break
            beam, choice = divmod(flat_index, scores.shape[1])
            score = scores[beam, choice]
            if not np.isfinite(score):
                break
            token = self._continued(self.live[beam], candidates[beam], choice, score)
            stops = self._is_stop(token)
            if stops or is_last:
                if may_finish:
                    self._finish(token, stops=stops)
            elif len(live) < self.width:
                live.append(token)
                parents.append(beam)
        self.live = live
        self._settle()
        return parents

    def _continued(
        self, beam: BeamToken, candidates: TokenLogprobs, choice: int, score: np.float32
    ) -> BeamToken:
        """Return the token that follows `beam`, which is candidate `choice` from 0 on."""
        logprobs, column = None, choice + 1
        token_id = candidates.token_ids[column]
        if self._num_logprobs is not None:
            most = slice(1, self._num_logprobs + 1)
            logprobs = TokenLogprobs(
                token_ids=[token_id, *candidates.token_ids[most]],
                logprobs=[candidates.logprobs[column], *candidates.logprobs[most]],
                ranks=[candidates.ranks[column], *candidates.ranks[most]],
            )
        return BeamToken(beam, token_id, score, beam.length + 1, logprobs)

    def _is_stop(self, token: BeamToken) -> bool:
        return token.token_id in self._stop_token_ids and token.length > self._min_tokens

    def _normalized(self, score: np.float32, length: int) -> float:
        return float(score) / math.pow(length, self._length_penalty)

    def _finish(self, last: BeamToken, *, stops: bool) -> None:
        self.finished.append(Hypothesis(last, self._normalized(last.score, last.length), stops))
        self.finished.sort(key=lambda each: -each.score)
        del self.finished[self.width :]

    def _settle(self) -> None:
        """Find the last token that the live beams and the best hypothesis have in common.

        A hypothesis that is not the best one never becomes it.
        """
        before, self._ends = self._ends, {*self.live, *(each.last for each in self.finished[:1])}
        for token in self._ends - before:
            assert token.parent is not None
            self._children.setdefault(token.parent, set()).add(token)
        for token in before - self._ends:
            self._drop(token)
        while len(children := self._children.get(self.settled, ())) == 1:
            del self._children[self.settled]
            self.settled = next(iter(children))

    def _drop(self, token: BeamToken) -> None:
        """Forget what nobody continues any more; each token is forgotten once."""
        while token is not self.settled and token not in self._children:
            assert token.parent is not None
            self._children[token.parent].discard(token)
            token = token.parent
            if self._children[token]:
                break
            del self._children[token]
