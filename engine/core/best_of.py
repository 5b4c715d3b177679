"""best_of: the most likely of several sampled sequences, once all of them have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.request import Request
from engine.request.sampling_params import SamplingParams


@dataclass(slots=True)
class Candidates:
    """The sequences of one request, of which the best are handed out: `ended` of `count`."""

    count: int = 0
    ended: list[Request] = field(default_factory=list)


class Candidate(Request):
    """It is handed out if its mean log-probability per token is among the `n` highest."""

    def __init__(
        self,
        uid: int,
        prompt_token_ids: NDArray[np.int32],
        sampling_params: SamplingParams,
        *,
        group: Candidates,
        **settings: Any,
    ) -> None:
        """Join `group`; the rest is as for any `Request`. Nothing is streamed."""
        super().__init__(uid, prompt_token_ids, sampling_params, **{**settings, "stream": False})
        self._group = group
        group.count += 1

    @property
    def num_top_logprobs(self) -> int:
        """Its own log-probabilities are always found."""
        return self.sampling_params.logprobs or 0

    def results(self) -> Sequence[Request]:
        """Return the best sequences if the last one has ended, numbered by rank."""
        if self.finish is None:
            return ()
        if self.finish.error is not None:
            return (self,)  # and so the request fails
        group = self._group
        group.ended.append(self)
        if len(group.ended) < group.count:
            return ()
        group.ended.sort(key=lambda each: each.index)
        prompt_scores = group.ended[0].prompt_scores
        best = sorted(group.ended, key=_rank)[: self.sampling_params.n]
        for index, each in enumerate(best):
            each.index = index
            each.prompt_scores = None if index else prompt_scores
        return best


def _rank(request: Request) -> tuple[bool, float]:
    """Smaller is better; what was aborted comes last."""
    num_tokens = request.num_output_tokens
    mean = request.output.cumulative_logprob / num_tokens if num_tokens else -math.inf
    return request.finish_reason == "abort", -mean
