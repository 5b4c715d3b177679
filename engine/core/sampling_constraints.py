"""SamplingConstraints: tokens that the host forbids in a step, because only it can find them."""

from __future__ import annotations

import numpy as np

from engine.core.request import Request
from engine.core.schedule import SamplingBatch, Schedule

_NO_PAIRS = np.zeros(0, dtype=np.int32)
_NOTHING = SamplingBatch(_NO_PAIRS, _NO_PAIRS)


class SamplingConstraints:
    """The running sequences with bad words, or with stop tokens and `min_tokens`."""

    def __init__(self) -> None:
        """Start with none."""
        self._requests: dict[int, Request] = {}  # by slot

    def add(self, slot: int, request: Request) -> None:
        """`request` runs in `slot`."""
        has_early_stops = request.sampling_params.min_tokens > 0 and request.stop_token_ids
        if request.bad_words is not None or has_early_stops:
            self._requests[slot] = request

    def discard(self, slot: int) -> None:
        """No sequence runs in `slot` any more."""
        self._requests.pop(slot, None)

    def batch(self, schedule: Schedule) -> SamplingBatch:
        """Return the tokens that the rows of the newest `schedule` must not get."""
        if not self._requests:
            return _NOTHING
        rows, token_ids = [], []
        for row in np.flatnonzero(schedule.wants_token).tolist():
            request = self._requests.get(int(schedule.slots[row]))
            if request is not None:
                found = _forbidden(request, int(schedule.num_output_tokens[row]))
                rows += [row] * len(found)
                token_ids += found
        return SamplingBatch(np.array(rows, dtype=np.int32), np.array(token_ids, dtype=np.int32))


def _forbidden(request: Request, num_output_tokens: int) -> list[int]:
    found = []
    if request.bad_words is not None:
        assert num_output_tokens == request.num_output_tokens, "a token has not been read"
        found += request.bad_words.forbidden(request.token_ids, request.num_prompt_tokens)
    if num_output_tokens < request.sampling_params.min_tokens:
        found += request.stop_token_ids
    return found
