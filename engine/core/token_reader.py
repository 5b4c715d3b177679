"""TokenReader: brings the tokens that a step has sampled to their sequences."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import FinishReason, Request
from engine.core.sampled_logprobs import token_logprobs
from engine.core.schedule import RUNNING, Samples
from engine.core.slot_states import SlotStates
from engine.protocol import TokenLogprobs
from engine.text.byte_sets import ByteSets

# By what the device says of a row: its sequence goes on, or why it has ended.
_FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")


@dataclass(slots=True)
class Advanced:
    """The sequences that got a token from one step.

    Attributes:
        slots: int32 [N], of those that go on and need no closer look.
        examined: the others: ended, or watched by the host, or preempted since.
        begun: those that got their first token.
        token_gaps_s: float64 [M], for each of the others the time since its last token.
    """

    slots: NDArray[np.int32]
    examined: list[Request] = field(default_factory=list)
    begun: list[Request] = field(default_factory=list)
    token_gaps_s: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @property
    def finished(self) -> list[Request]:
        """Those that have ended with their token."""
        return [request for request in self.examined if request.finish is not None]


class TokenReader:
    """Remembers whose rows are in flight: a slot may have another owner when they are read."""

    def __init__(self, states: SlotStates, kv_cache: KVCacheManager, token_bytes: ByteSets) -> None:
        """Read the tokens of the sequences in `states`, and commit the blocks that they fill.

        `token_bytes` is `TokenFlags.byte_sets`.
        """
        self._token_bytes = token_bytes
        self._states = states
        self._kv_cache = kv_cache
        # Of each step in flight, slots and serials of the rows that sample a token.
        self._in_flight: deque[tuple[NDArray[np.int32], NDArray[np.int64]]] = deque()
        self._without_slot: dict[int, Request] = {}  # by serial, those with unread tokens

    def launch(self, slots: NDArray[np.int32]) -> None:
        """Note a step in which `slots` sample a token, [R] in the order of its rows."""
        self._in_flight.append((slots, self._states.serial[slots]))

    def cancel(self) -> None:
        """Forget the newest step, which is never read; its sequences still have their slots."""
        slots, _ = self._in_flight.pop()
        self._states.num_unread_tokens[slots] -= 1

    def release_slot(self, request: Request) -> None:
        """Free the slot of `request`, which may have tokens in flight."""
        serial = self._states.release(request)
        if request.num_unread_tokens:
            self._without_slot[serial] = request

    def read(self, samples: Samples) -> Advanced:
        """Take the tokens of the oldest step in flight; those of ended sequences are dropped."""
        now, states = time.monotonic(), self._states
        slots, serials = self._in_flight.popleft()
        rows = np.flatnonzero(states.serial[slots] == serials)
        here = slots[rows]
        token_ids, ended = samples.token_ids[rows], samples.finish_reasons[rows]
        # Before the token, because its own KV is computed only if it is not the last.
        place = states.num_tokens[here]
        self._commit(here, place)
        states.token_ids[here, place] = token_ids
        states.num_tokens[here] = place + 1
        states.num_unread_tokens[here] -= 1
        is_first = place == states.num_prompt_tokens[here]
        gaps = now - states.last_token_time[here[~is_first]]
        states.last_token_time[here] = now
        is_examined = (ended != RUNNING) | states.is_watched[here]
        watched_bytes = states.watched_bytes[here]
        if watched_bytes.any():
            is_examined |= (self._token_bytes[token_ids] & watched_bytes).any(axis=1)
        advanced = Advanced(here[~is_examined], token_gaps_s=gaps)
        for slot in here[is_first].tolist():
            self._begin(states.owner(slot), now, advanced)
        examined, logprobs = np.flatnonzero(is_examined), token_logprobs(samples)
        for slot, row in zip(here[examined].tolist(), rows[examined].tolist(), strict=True):
            request = states.owner(slot)
            _examine(request, samples, row, logprobs)
            if request.output.stop_checker is not None:
                states.watched_bytes[slot] = request.output.stop_checker.watch
            advanced.examined.append(request)
        if len(rows) < len(slots):
            self._read_without_slot(serials, samples, now, advanced)
        return advanced

    def _read_without_slot(
        self, serials: NDArray[np.int64], samples: Samples, now: float, advanced: Advanced
    ) -> None:
        """Take the tokens of sequences that were preempted after the step was launched."""
        for row, serial in enumerate(serials.tolist()):
            request = self._without_slot.get(serial)
            if request is None:
                continue
            request.num_unread_tokens -= 1
            if not request.num_unread_tokens:
                del self._without_slot[serial]
            if request.finish is not None:
                continue
            request.append(int(samples.token_ids[row]))
            if request.num_output_tokens == 1:
                self._begin(request, now, advanced)
            else:
                gap = now - request.times.last_token
                advanced.token_gaps_s = np.append(advanced.token_gaps_s, gap)
            request.times.last_token = now
            _examine(request, samples, row, token_logprobs(samples))
            advanced.examined.append(request)

    def _begin(self, request: Request, now: float, advanced: Advanced) -> None:
        request.times.first_token = now
        advanced.begun.append(request)

    def _commit(self, slots: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> None:
        """Enter the blocks in the prefix cache that are full with the tokens known so far."""
        if self._kv_cache.enable_prefix_caching:
            is_full = num_tokens % self._kv_cache.block_size == 0
            for i in np.flatnonzero(is_full).tolist():
                self._kv_cache.commit(self._states.owner(slots[i]), int(num_tokens[i]))


def _examine(
    request: Request, samples: Samples, row: int, logprobs: Mapping[int, TokenLogprobs]
) -> None:
    """Look at the token of `row`, the newest of `request`."""
    try:
        request.examine(
            int(samples.token_ids[row]),
            _FINISH_REASONS[samples.finish_reasons[row]],
            logprobs.get(row),
        )
    except Exception as error:  # the stop search runs on the request's data
        request.fail(error)
