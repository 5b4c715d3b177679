"""TokenReader: brings the tokens that a step has sampled to their sequences."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.constraints.forced_tokens import TokenForcer
from engine.core.embeddings import EmbeddingReader
from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.core.logprobs.prompt_scorer import PromptScorer
from engine.core.logprobs.sampled_logprobs import token_logprobs
from engine.core.request import FinishReason, Request
from engine.core.schedule import RUNNING, Samples, Schedule
from engine.core.slot_states import SlotStates
from engine.text.byte_sets import ByteSets

# By what the device says of a row: its sequence goes on, or why it has ended.
_FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")


@dataclass(slots=True)
class Advanced:
    """The sequences that got a token from one step.

    Attributes:
        slots: int32 [N], of those that go on and need no closer look.
        examined: the others: ended, or watched by the host.
        begun: those that got their first token.
        token_gaps_s: float64 [M], of those with earlier tokens, the time since the last one.
        num_forced: tokens that came with these, without a step of their own.
    """

    slots: NDArray[np.int32]
    examined: list[Request]
    begun: list[Request]
    token_gaps_s: NDArray[np.float64]
    num_forced: int = 0

    @property
    def finished(self) -> list[Request]:
        """Those that have ended with their token."""
        return [request for request in self.examined if request.finish is not None]


class TokenReader:
    """Remembers whose rows are in flight: a slot may have another owner when they are read.

    Attributes:
        scorer: does so for the prompts whose log-probabilities are found.
        embeddings: the same for those whose embeddings are.
    """

    def __init__(self, states: SlotStates, kv_cache: KVCacheManager, token_bytes: ByteSets) -> None:
        """Read the tokens of the sequences in `states`, and commit the blocks that they fill.

        `token_bytes` is `TokenFlags.byte_sets`.
        """
        self._token_bytes = token_bytes
        self._states = states
        self._kv_cache = kv_cache
        self.scorer = PromptScorer()
        self.embeddings = EmbeddingReader()
        self._forcer = TokenForcer(states, vocab_size=len(token_bytes))
        # Of each step in flight, slots and serials of the rows that sample a token.
        self._in_flight: deque[tuple[NDArray[np.int32], NDArray[np.int64]]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    def launch(self, schedule: Schedule) -> Schedule:
        """Note the next step; return it with what it scores, and with the forced tokens."""
        slots = schedule.slots[schedule.wants_token]
        self._in_flight.append((slots, self._states.serial[slots]))
        return self.embeddings.launch(self.scorer.launch(self._forcer.launch(schedule)))

    def cancel(self) -> None:
        """Forget the newest step, which is never read; its sequences still have their slots."""
        slots, _ = self._in_flight.pop()
        self._states.num_unread_tokens[slots] -= 1
        self.scorer.cancel()
        self.embeddings.cancel()

    def read(self, samples: Samples) -> Advanced:
        """Take the tokens of the oldest step in flight; those of sequences without slot are lost.

        These have ended, or were preempted: then the token is drawn again, from the same seed.
        """
        # Before the first token, which goes out with what they find.
        self.scorer.read(samples)
        self.embeddings.read(samples)
        now, states = time.monotonic(), self._states
        slots, serials = self._in_flight.popleft()
        rows = (states.serial[slots] == serials).nonzero()[0]
        slots = slots[rows]
        token_ids, ended = samples.token_ids[rows], samples.finish_reasons[rows]
        # Before the token, because its own KV is computed only if it is not the last.
        place = states.num_tokens[slots]
        self._commit(slots, place)
        states.token_ids[slots, place] = token_ids
        states.num_tokens[slots] = place + 1
        states.num_unread_tokens[slots] -= 1
        is_first = place == states.num_prompt_tokens[slots]
        gaps = now - states.last_token_time[slots[~is_first]]
        states.last_token_time[slots] = now
        begun = [states.owner(slot) for slot in slots[is_first].tolist()]
        for request in begun:
            request.times.first_token = now
        if samples.logprobs is not None:
            logprobs = token_logprobs(samples)
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                if row in logprobs:
                    states.owner(slot).output.add_logprobs(logprobs[row])
        is_examined = (ended != RUNNING) | states.is_watched[slots]
        searched = states.has_stop_strings[slots].nonzero()[0]
        if len(searched):
            found = self._token_bytes[token_ids[searched]] & states.watched_bytes[slots[searched]]
            is_examined[searched] |= found.any(axis=1)
        examined, num_forced = [], 0
        for i in is_examined.nonzero()[0].tolist():
            request = states.owner(slots[i])
            reason = _FINISH_REASONS[ended[i]]
            request.examine(int(token_ids[i]), reason)
            if request.takes_forced_tokens:
                num_forced += self._forcer.append(request)
            if request.thinking is not None:
                states.host_chooses[slots[i]] = request.host_chooses
            if request.output.stop_checker is not None:
                states.watched_bytes[slots[i]] = request.output.stop_checker.watch
            examined.append(request)
        return Advanced(slots[~is_examined], examined, begun, gaps, num_forced)

    def _commit(self, slots: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> None:
        """Enter the blocks in the prefix cache that are full with the tokens known so far."""
        if self._kv_cache.prefix_cache.enabled:
            is_full = num_tokens % self._kv_cache.block_size == 0
            for i in is_full.nonzero()[0].tolist():
                self._kv_cache.prefix_cache.commit(self._states.owner(slots[i]), int(num_tokens[i]))
