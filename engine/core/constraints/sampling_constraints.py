"""SamplingConstraints: what the host decides about the tokens of a step, as only it can."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.core.constraints.adjustments import LogitsAdjuster
from engine.core.constraints.token_masks import forbid, token_mask
from engine.core.request import Request
from engine.core.schedule import MAX_STOP_TOKEN_IDS, SamplingBatch, SchedulerOutput


class SamplingConstraints:
    """The running sequences with a grammar, bad words, a thinking budget, or `min_tokens` and more
    stop tokens than the device knows; and those with logits processors.
    """

    def __init__(self, *, vocab_size: int) -> None:
        """Start with none."""
        self._every_token = token_mask(np.arange(vocab_size, dtype=np.int32), -(-vocab_size // 32))
        self._nothing = SamplingBatch(np.zeros(0, dtype=np.int32), self._every_token[None][:0])
        self._vocab_size = vocab_size
        self._adjuster = LogitsAdjuster(vocab_size)
        self._running: dict[int, tuple[Request, NDArray[np.int32]]] = {}  # by slot, with its mask

    def add(self, slot: int, request: Request) -> None:
        """`request` runs in `slot`."""
        self._adjuster.add(slot, request)
        if (
            request.bad_words
            or request.grammar
            or request.thinking
            or (
                request.sampling_params.min_tokens
                and len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS
            )
        ):
            mask, allowed = self._every_token, request.sampling_params.allowed_token_ids
            if allowed is not None:
                mask = token_mask(np.array(allowed, dtype=np.int32), len(mask))
            self._running[slot] = request, mask

    def discard(self, slot: int) -> None:
        """No sequence runs in `slot` any more."""
        self._running.pop(slot, None)
        self._adjuster.discard(slot)

    def batch(self, schedule: SchedulerOutput) -> SamplingBatch:
        """Return the masks of the rows of the newest `schedule` that must not get some tokens.

        And what the logits processors of its rows add.
        """
        masked = self._masked(schedule) if self._running else self._nothing
        adjustments = self._adjuster.adjustments(schedule)
        return masked if adjustments is None else replace(masked, adjustments=adjustments)

    def _masked(self, schedule: SchedulerOutput) -> SamplingBatch:
        rows = {
            row: self._running[slot]
            for row in np.flatnonzero(schedule.wants_token).tolist()
            if (slot := int(schedule.slots[row])) in self._running
        }
        masks = {}
        for row, (request, allowed) in rows.items():
            left = allowed
            if request.grammar is not None:
                left = allowed & request.grammar.mask(self._vocab_size)
            mask = _mask(request, left, int(schedule.num_output_tokens[row]))
            if mask is not None:
                masks[row] = mask
        if not masks:
            return self._nothing
        return SamplingBatch(np.array([*masks], dtype=np.int32), np.stack([*masks.values()]))


def _mask(
    request: Request, left: NDArray[np.int32], num_output_tokens: int
) -> NDArray[np.int32] | None:
    """Return the mask of a row, of which `left` may be drawn; None if the device knows it.

    A token that is required must come, if a grammar does not forbid it. What is forbidden beyond
    that is allowed if nothing else is left. A grammar that leaves nothing fails with whatever
    token comes.
    """
    if (token_id := request.required_token) is not None:
        required = left & token_mask(np.array([token_id], dtype=np.int32), len(left))
        if required.any():
            return required
    if forbidden := _forbidden(request, num_output_tokens):
        mask = left.copy()
        forbid(mask, np.array(forbidden, dtype=np.int32))
        if mask.any():
            return mask
    return left if request.grammar is not None and left.any() else None


def device_forbids_stops(request: Request) -> bool:
    """Whether the device forbids the stop tokens of `request` before `min_tokens`.

    It knows them, the host forbids nothing itself, and they do not leave it without any token.
    """
    params, stops = request.sampling_params, request.stop_token_ids
    return (
        params.min_tokens > 0
        and 0 < len(stops) <= MAX_STOP_TOKEN_IDS
        and request.bad_words is None
        and request.grammar is None
        and request.thinking is None
        and (params.allowed_token_ids is None or not stops.issuperset(params.allowed_token_ids))
    )


def _forbidden(request: Request, num_output_tokens: int) -> list[int]:
    found = []
    if request.bad_words is not None:
        assert num_output_tokens == request.num_output_tokens, "a token has not been read"
        found += request.bad_words.forbidden(request.token_ids, request.num_prompt_tokens)
    if num_output_tokens < request.sampling_params.min_tokens:
        found += request.stop_token_ids
    return found
