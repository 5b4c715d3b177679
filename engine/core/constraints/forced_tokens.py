"""TokenForcer: takes the tokens that grammars leave no choice about, without a forward pass."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from engine.core.ragged import ragged
from engine.core.request import Request
from engine.core.schedule import ForcedTokens, Schedule
from engine.core.slot_states import SlotStates

# So that no step waits long for others: tokens of one sequence, and the time of all sequences after
# which the rest of them sample the next token instead, which costs a forward pass and is the same.
_MAX_AT_ONCE = 4096
_MAX_S = 0.05


class TokenForcer:
    """Appends such tokens to the running sequences, and tells the device with the next step.

    That step computes them together, as a chunk of a prompt.
    """

    def __init__(self, states: SlotStates, *, vocab_size: int) -> None:
        """Append tokens to the sequences in `states`, with `vocab_size` logits per token."""
        self._states = states
        self._vocab_size = vocab_size
        self._spent_s = 0.0  # in this step
        # By slot: its serial, and the number of tokens that the device knows.
        self._known: dict[int, tuple[int, int]] = {}

    def append(self, request: Request) -> int:
        """Append what must follow the newest token of a running sequence; return how much.

        The sequence may end with it, or with an error of the grammar.
        """
        start, slot = request.num_tokens, request.slot
        assert slot is not None
        if request.finish is None and self._spent_s < _MAX_S:
            began = time.monotonic()
            for token_id in request.forced_tokens()[:_MAX_AT_ONCE]:
                if token_id >= self._vocab_size:
                    break  # the model cannot go on: that is found when it should
                request.force(token_id)
                if request.finish is not None:
                    break
            self._spent_s += time.monotonic() - began
        num_forced = request.num_tokens - start
        if num_forced and request.finish is None:
            self._known[slot] = int(self._states.serial[slot]), start
        return num_forced

    def launch(self, schedule: Schedule) -> Schedule:
        """Return the next step with the tokens that were appended since the one before."""
        self._spent_s = 0.0
        if not self._known:
            return schedule
        states = self._states
        known = {
            slot: start
            for slot, (serial, start) in self._known.items()
            if states.serial[slot] == serial  # else it ended, or is admitted with all its tokens
        }
        self._known = {}
        if not known:
            return schedule
        forced = ForcedTokens(
            slots=np.array([*known], dtype=np.int32),
            starts=np.array([*known.values()], dtype=np.int32),
            token_ids=ragged(
                [
                    states.token_ids[slot, start : states.num_tokens[slot]]
                    for slot, start in known.items()
                ]
            ),
        )
        return replace(schedule, forced=forced)
