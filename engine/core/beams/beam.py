"""Beam: a sequence of the engine that holds one beam of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.beams.beam_search import BeamSearch, BeamToken
from engine.core.request import Finish, FinishReason, Request
from engine.core.request_state import RequestOutput
from engine.errors import RequestError
from engine.protocol.messages import TokenLogprobs
from engine.request.sampling_params import SamplingParams


@dataclass(slots=True)
class BeamOutput(RequestOutput):
    """The output of a beam; `candidates` are its most likely next tokens, once they are found."""

    candidates: TokenLogprobs | None = None

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Take the candidates; what is drawn is of no interest."""
        self.candidates = logprobs


@dataclass(slots=True)
class BeamGroup:
    """The sequences of one search, all of one request.

    Attributes:
        search: chooses their tokens.
        members: all of them, by `index`.
        live: those with the beams `search.live`, in that order.
    """

    search: BeamSearch
    members: list[Beam] = field(default_factory=list)
    live: list[Beam] = field(default_factory=list)


class Beam(Request):
    """A sequence whose next token its `group` chooses among the candidates of all live beams.

    The first sequence computes the prompt; the others wait for the first choice. After each choice
    a sequence may go on with another one's beam. Only the first `n` are handed out, and until the
    search is over only what the first one has in any case, if `n` is 1.
    """

    is_beam = True

    def __init__(
        self,
        uid: int,
        prompt_token_ids: NDArray[np.int32],
        sampling_params: SamplingParams,
        *,
        group: BeamGroup,
        **settings: Any,
    ) -> None:
        """Join `group`; the rest is as for any `Request`."""
        super().__init__(uid, prompt_token_ids, sampling_params, **settings)
        self.group = group
        self.output: BeamOutput = BeamOutput(self.output.window_ids, tracker=self.output.tracker)
        self.waits = bool(group.members)
        if group.members:
            self.times = group.members[0].times
        else:
            group.live.append(self)
        group.members.append(self)

    @property
    def num_top_logprobs(self) -> int:
        """How many candidates are found."""
        return self.group.search.num_candidates

    @property
    def is_awaited(self) -> bool:
        """Whether other beams of the search run: they wait until this one has been computed."""
        return any(each.slot is not None for each in self.group.live if each is not self)

    @property
    def companions(self) -> Sequence[Request]:
        """The live beams of its search, itself among them."""
        return self.group.live

    @property
    def host_chooses(self) -> bool:
        """Always: no step may run ahead of the choice."""
        return True

    @property
    def is_watched(self) -> bool:
        """Always: for the candidates."""
        return True

    @property
    def num_releasable_tokens(self) -> int:
        """Output tokens that may be released to the client now."""
        if self.finish is not None:
            return self.num_output_tokens
        # Reasoning and tool calls are parsed in the whole output alone.
        is_streamed = self.stream and self.sampling_params.n == 1 and self.output.tracker is None
        return self.group.search.settled.length if is_streamed else 0

    def results(self) -> Sequence[Request]:
        """Return itself if it is one of those to hand out."""
        return (self,) if self.index < self.sampling_params.n else ()

    def examine(self, token_id: int, ended: FinishReason | None) -> None:
        """Drop the token, and wait for the choice of the group."""
        assert self.output.candidates is not None
        self.num_tokens -= 1
        self.waits = True

    def abort(self) -> None:
        """End with the best output so far."""
        super().abort()
        search = self.group.search
        best = [*(each.last for each in search.finished), *search.live]
        if self.index < min(len(best), self.sampling_params.n):
            self._hand_over(best[self.index])

    def end(self) -> None:
        """End with its output of the search, which is over."""
        finished, num_asked = self.group.search.finished, self.sampling_params.n
        if self.index >= num_asked:
            self.finish = Finish("stop")
        elif len(finished) < num_asked:
            text = (
                f"beam_width: only {len(finished)} different outputs are possible (asked for: "
                f"{num_asked})"
            )
            self.finish = Finish("error", error=RequestError(text))
        else:
            last, _, stops = finished[self.index]
            self._hand_over(last)
            self.finish = Finish("length")
            if stops:
                keeps = self.sampling_params.include_stop_str_in_output
                self.finish = Finish("stop", last.token_id, omit_stop_token=not keeps)

    def write(self, token_ids: NDArray[np.int32]) -> None:
        """Replace all tokens."""
        if self.slot is None:
            self.tokens = token_ids.copy()
        else:
            self.tokens[: len(token_ids)] = token_ids
        self.num_tokens = len(token_ids)

    def append(self, token_id: int) -> None:
        """Add the token that has been chosen for it."""
        self.write(np.append(self.token_ids, np.int32(token_id)))
        self.output.candidates = None
        self.waits = False

    def add_settled_logprobs(self, last: BeamToken) -> None:
        """Add the log-probabilities of the tokens up to `last`, if they are asked for."""
        self.output.cumulative_logprob = float(last.score)
        found = last.path(self.num_released_tokens)
        self.output.logprobs = [each.logprobs for each in found if each.logprobs is not None]

    def _hand_over(self, last: BeamToken) -> None:
        """Replace the output by that which ends with `last`."""
        output = np.array([token.token_id for token in last.path()], dtype=np.int32)
        self.tokens = np.concatenate([self.token_ids[: self.num_prompt_tokens], output])
        self.num_tokens = len(self.tokens)
        self.num_cached_tokens = self.group.members[0].num_cached_tokens
        self.add_settled_logprobs(last)
