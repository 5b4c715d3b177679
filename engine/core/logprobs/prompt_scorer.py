"""PromptScorer: finds the log-probabilities of prompts in the steps that compute them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from engine.core.logprobs.prompt_scores import PromptScores
from engine.core.logprobs.scored_tokens import ScoredTokens
from engine.core.request import Request
from engine.core.schedule import Samples, Schedule


class PromptScorer:
    """Has each token of the prompts that want it scored once, however their steps are cut.

    What a step in flight scores is delivered even if its sequence is preempted meanwhile: then the
    tokens are computed again, but not scored.
    """

    def __init__(self) -> None:
        """Begin without sequences and steps."""
        self._running: dict[int, tuple[Request, PromptScores]] = {}  # by slot, with tokens to score
        # Of each step in flight, whose tokens it scores, and how many of each.
        self._in_flight: deque[list[tuple[PromptScores, int]]] = deque()

    def add(self, request: Request) -> None:
        """Note that `request` has got a slot."""
        scores = request.prompt_scores
        if scores is not None and not scores.is_scheduled:
            assert request.slot is not None
            self._running[request.slot] = request, scores

    def launch(self, schedule: Schedule) -> Schedule:
        """Return the next step with the tokens that it scores, and note that it will be read."""
        taken: list[tuple[PromptScores, int]] = []
        self._in_flight.append(taken)
        if self._running:  # those that have given up their slots are forgotten
            self._running = {s: each for s, each in self._running.items() if each[0].slot == s}
        if not self._running:
            return schedule
        places, token_ids = [], []
        row_ends = np.cumsum(schedule.num_tokens)
        for row in np.flatnonzero(np.isin(schedule.slots, list(self._running))).tolist():
            slot, num_tokens = int(schedule.slots[row]), int(schedule.num_tokens[row])
            request, scores = self._running[slot]
            end = request.num_prompt_tokens + int(schedule.num_output_tokens[row])
            start, stop = scores.num_scheduled, min(end, scores.num_tokens)
            assert end - num_tokens <= start, "a token would not be scored"
            if start >= stop:
                continue  # computed again
            places.append(np.arange(start, stop) + (row_ends[row] - end))
            token_ids.append(request.token_ids[start + 1 : stop + 1])
            taken.append((scores, stop - start))
            scores.num_scheduled = stop
            if scores.is_scheduled:
                del self._running[slot]
        if not taken:
            return schedule
        scored = ScoredTokens(
            places=np.concatenate(places).astype(np.int32),
            token_ids=np.concatenate(token_ids),
            num_top=max(scores.num_top for scores, _ in taken),
        )
        return replace(schedule, scored=scored)

    def cancel(self) -> None:
        """Forget the newest step, whose sequences must be aborted."""
        self._in_flight.pop()

    def read(self, samples: Samples) -> None:
        """Take what the oldest step in flight has found."""
        start = 0
        for scores, count in self._in_flight.popleft():
            assert samples.prompt_logprobs is not None
            scores.append(samples.prompt_logprobs, start, start + count)
            start += count
