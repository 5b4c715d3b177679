"""Forks: samples of one prompt that wait until the first of them has computed it."""

from __future__ import annotations

from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.core.queue.waiting_queues import WaitingQueues
from engine.core.request import Request
from engine.core.slot_states import SlotStates


class Forks:
    """Lets the samples of a prompt share its blocks."""

    def __init__(
        self, states: SlotStates, kv_cache: KVCacheManager, waiting: WaitingQueues
    ) -> None:
        """Queue them in `waiting`, when the sequence in `states` that has them is so far."""
        self._states = states
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._parents: list[Request] = []  # running, with siblings that wait for their prompt's KV

    def add(self, request: Request) -> None:
        """Note that `request` runs."""
        if request.forks:
            self._parents.append(request)

    def release(self) -> None:
        """Queue the siblings of sequences whose prompt is computed, with its blocks."""
        for parent in self._parents:
            if parent.slot is not None and parent.num_computed_tokens >= parent.num_prompt_tokens:
                for child in parent.forks:
                    self._kv_cache.fork(parent, child)
                    self._waiting.push(child)
                self._states.share_tail(parent)
                parent.forks = []
        self._parents = [each for each in self._parents if each.forks and each.slot is not None]

    def reclaim(self) -> bool:
        """Free the blocks of the last waiting fork that has some; False if none has."""
        if (fork := self._waiting.pop_last_fork()) is None:
            return False
        self._kv_cache.free(fork)
        fork.num_computed_tokens = 0
        self._waiting.push(fork)
        return True
