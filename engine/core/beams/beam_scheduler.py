"""BeamScheduler: assigns the beams that a search has chosen, and their KV, to its sequences."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.beams.beam import Beam, BeamGroup
from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.core.queue.waiting_queues import WaitingQueues
from engine.core.request import Request
from engine.core.schedule_builder import ScheduleBuilder
from engine.core.seq_slots import SeqSlots
from engine.core.update_from_output import UpdateResult


class BeamScheduler:
    """Lets beams go on when the candidates of all live beams of their search are known.

    Until then a beam keeps slot and blocks; its next token counts as unread. If it is preempted, it
    is held in no queue. One with several continuations shares its blocks with the sequences that
    take the others; whoever writes into a shared block first copies it.
    """

    def __init__(self, states: SeqSlots, kv_cache: KVCacheManager, waiting: WaitingQueues) -> None:
        """The beams are among the sequences in `states` and `waiting`."""
        self._states = states
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._chosen: list[Beam] = []  # running, with a token that the device does not know

    def advance(self, result: UpdateResult) -> None:
        """Choose tokens with the candidates that have just been found.

        In place of all beams in `result.examined` come those that have something to hand out or
        have ended.
        """
        found = [each for each in result.examined if isinstance(each, Beam)]
        if not found:
            return
        for beam in found:
            self._states.num_unread_tokens[beam.slot] = 1
            # Of all of its search: each may go on with another one's tokens.
            beam.times.last_token = float(self._states.last_token_time[beam.slot])
        changed: list[Request] = []
        for group in {beam.uid: beam.group for beam in found}.values():
            if all(beam.waits for beam in group.live):
                changed += self._choose(group)
        others = [each for each in result.examined if not isinstance(each, Beam)]
        result.examined = others + changed

    def rewrite(self, step: ScheduleBuilder) -> None:
        """Send the device what has been chosen for the running beams, which have rows in `step`."""
        for beam in self._chosen:
            if beam.slot is not None:  # it has neither ended nor been preempted
                step.rewrite(beam)
        self._chosen.clear()

    def _choose(self, group: BeamGroup) -> Sequence[Beam]:
        """Choose the next tokens of a search; return the sequences as in `advance`."""
        search, settled = group.search, group.search.settled
        candidates = [beam.output.candidates for beam in group.live]
        parents = search.advance([each for each in candidates if each is not None])
        if search.is_over:
            for beam in group.members:
                beam.end()
            return group.members
        self._hand_on(group, [group.live[parent] for parent in parents])
        if search.settled is not settled:
            group.members[0].add_settled_logprobs(search.settled)
        return group.members[:1]

    def _hand_on(self, group: BeamGroup, parents: Sequence[Beam]) -> None:
        """Let sequences go on with the beams `search.live`, which continue those of `parents`."""
        free = [beam for beam in group.members if beam not in parents]
        free.sort(key=lambda beam: beam.slot is None)  # running ones first
        group.live = []
        for parent in parents:
            group.live.append(parent if parent not in group.live else free.pop(0))
        token_ids = [token.token_id for token in group.search.live]
        for beam, parent, token_id in zip(group.live, parents, token_ids, strict=True):
            if beam is not parent:
                self._kv_cache.reset(beam)
                beam.write(parent.token_ids)
                beam.append(token_id)
                if parent.kv.tables:
                    self._kv_cache.fork(parent, beam)
        for beam, parent, token_id in zip(group.live, parents, token_ids, strict=True):
            if beam is parent:
                beam.append(token_id)
            self._seat(beam)
        for beam in free:  # there are fewer beams than sequences
            self._kv_cache.reset(beam)
            beam.write(parents[0].token_ids)
            beam.waits = True
            self._seat(beam)

    def _seat(self, beam: Beam) -> None:
        """Let a sequence with new tokens go on: at once if it runs, else when its turn comes."""
        if beam.slot is not None:
            self._states.share_tail(beam)
            self._states.num_unread_tokens[beam.slot] = beam.waits
            self._states.last_token_time[beam.slot] = beam.times.last_token
            if not beam.waits:
                self._chosen.append(beam)
        else:
            self._waiting.discard(beam)
            (self._waiting.hold if beam.waits else self._waiting.push)(beam)
