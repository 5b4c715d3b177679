"""Speculative decoding: draft tokens, proposed behind the last known ones of a sequence.

A step draws a token behind each of them. As long as that is the next draft, it is the token that a
step of its own would have drawn, from the same logits and random numbers: so drafts change when
tokens come, and never which.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config.speculative_config import SpeculativeConfig
from engine.core.kv.group_windows import blocks_for
from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.core.queue.waiting_queues import WaitingQueues
from engine.core.ragged import ragged
from engine.core.request import Request
from engine.core.schedule import SchedulerOutput
from engine.core.seq_slots import SeqSlots
from engine.core.spec_decode.draft_tokens import DraftTokens

# A step of so many tokens takes a CPU hardly longer than one of a single token: both read all
# weights. Above, a draft that is not drawn costs as much as a token.
_FREE_TOKENS = 12

_NOTHING = np.zeros(0, dtype=np.int32)


class Proposer(Protocol):
    """Guesses tokens; how good they are decides how fast tokens come, never which.

    Attributes:
        max_tokens: guesses for one sequence in a step at most.
    """

    max_tokens: int

    def propose(self, request: Request, num_tokens: int) -> NDArray[np.int32]:
        """Return up to `num_tokens` tokens that may follow those of a running sequence."""


class NgramProposer:
    """Proposes what followed the latest match of the last tokens (prompt lookup).

    It finds copies and repetitions in the prompt and the output.

    Attributes:
        max_tokens: as of `Proposer`.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        """Look up `config.num_speculative_tokens` tokens."""
        self.max_tokens = config.num_speculative_tokens
        self._least, self._most = config.lookup_lengths

    @classmethod
    def of(cls, config: SpeculativeConfig | None) -> NgramProposer | None:
        """Return the proposer that `config` asks for; None: none."""
        return None if config is None else cls(config)

    def propose(self, request: Request, num_tokens: int) -> NDArray[np.int32]:
        """Return `num_tokens` guesses, or none."""
        return followers(request.token_ids, num_tokens, least=self._least, most=self._most)


def followers(
    token_ids: NDArray[np.int32], num_tokens: int, *, least: int, most: int
) -> NDArray[np.int32]:
    """Return `num_tokens` tokens that followed the end of `token_ids` earlier on, or none.

    The longest suffix of `least` to `most` tokens that occurred earlier is matched; its latest
    occurrence counts. If the match overlaps the end, the tokens that follow it repeat.
    """
    end = len(token_ids)
    ends = np.flatnonzero(token_ids[:-1] == token_ids[-1])  # of the last token, earlier on
    length = min(len(ends), 1)
    while 0 < length < most:
        longer = ends[ends >= length]
        longer = longer[token_ids[longer - length] == token_ids[end - 1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < least:
        return token_ids[:0]
    start = int(ends[-1]) + 1
    found: NDArray[np.int32] = token_ids[start + np.arange(num_tokens) % (end - start)]
    return found


class SpecDecode:
    """Proposes for the running sequences, while a step has room for tokens that cost nothing."""

    def __init__(
        self,
        proposer: Proposer | None,
        states: SeqSlots,
        kv_cache: KVCacheManager,
        waiting: WaitingQueues,
        max_num_batched_tokens: int,
        max_chunk: int,
    ) -> None:
        """Draft for the sequences in `states`, whose KV is in `kv_cache`.

        Args:
            proposer: None: there are never drafts.
            waiting: what may be admitted needs the tokens and blocks that drafts would take.
            max_num_batched_tokens: of a step.
            max_chunk: of these, tokens of one sequence.
        """
        self._proposer = proposer
        self._states = states
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._max_tokens = min(_FREE_TOKENS, max_num_batched_tokens)
        self._max_chunk = max_chunk
        # Of the step being scheduled, by slot: its serial, and the drafts.
        self._drafts: dict[int, tuple[int, NDArray[np.int32]]] = {}

    def draft(self, slots: NDArray[np.int32], num_new: NDArray[np.int32]) -> NDArray[np.int32]:
        """Draft for some of the sequences that advance in a step; return how much for each, [N].

        They share what the step has room for.

        Args:
            slots: int32 [N], those of the sequences.
            num_new: int32 [N], how many known tokens they compute.
        """
        self._drafts = {}
        num_drafts = np.zeros_like(num_new)
        if self._proposer is None or not len(slots) or num_new.max() > 1:
            return num_drafts
        num_spare = self._max_tokens - len(slots)
        most = min(num_spare, self._proposer.max_tokens, self._max_chunk - 1)
        may_admit = self._states.free and self._waiting.head is not None
        if most < 1 or may_admit or not self._has_blocks(len(slots), most):
            return num_drafts
        guesses = [self._guesses(self._proposer, slot, most) for slot in slots.tolist()]
        lengths = np.array([len(each) for each in guesses])
        while num_spare and len(chosen := (num_drafts < lengths).nonzero()[0][:num_spare]):
            num_drafts[chosen] += 1
            num_spare -= len(chosen)
        for slot, tokens, count in zip(slots.tolist(), guesses, num_drafts.tolist(), strict=True):
            if count:
                self._drafts[slot] = int(self._states.serial[slot]), tokens[:count]
        return num_drafts

    def launch(self, schedule: SchedulerOutput) -> SchedulerOutput:
        """Return the step that has been scheduled, with the drafts in it."""
        if not self._drafts:
            return schedule
        drafts = {
            row: self._drafts[slot][1]
            for row, slot in enumerate(schedule.slots.tolist())
            # Else it has been preempted for another one.
            if slot in self._drafts and self._drafts[slot][0] == self._states.serial[slot]
        }
        if not drafts:
            return schedule
        rows = np.array([*drafts], dtype=np.int32)
        starts = self._states.num_tokens[schedule.slots[rows]]
        token_ids = ragged([*drafts.values()])
        return replace(schedule, drafts=DraftTokens(rows, starts, token_ids))

    def _has_blocks(self, num_sequences: int, num_drafts: int) -> bool:
        """Whether drafts take no block that a token needs."""
        num_blocks = blocks_for(1 + num_drafts, self._kv_cache.block_size) + 1
        num_groups = len(self._kv_cache.windows.windows)
        return self._kv_cache.pool.num_free >= num_sequences * num_groups * num_blocks

    def _guesses(self, proposer: Proposer, slot: int, most: int) -> NDArray[np.int32]:
        """Return what a sequence may go on with, but for its last token: none comes behind that."""
        request = self._states.owner(slot)
        num_left = request.max_num_tokens - request.num_tokens - 1
        # Samples of its prompt share the block behind the prompt until its first token is drawn.
        if not request.num_output_tokens or num_left < 1 or not request.takes_drafts:
            return _NOTHING
        return proposer.propose(request, min(most, num_left))
