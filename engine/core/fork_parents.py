"""ForkParents: running sequences whose siblings wait for the KV of their common prompt."""

from __future__ import annotations

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.slot_states import SlotStates
from engine.core.waiting_queues import WaitingQueues


class ForkParents:
    """Queues the siblings when the prompt is computed."""

    def __init__(
        self, kv_cache: KVCacheManager, states: SlotStates, waiting: WaitingQueues
    ) -> None:
        """Fork sequences in `states`, and queue the new ones in `waiting`."""
        self._kv_cache = kv_cache
        self._states = states
        self._waiting = waiting
        self._parents: list[Request] = []

    def add(self, request: Request) -> None:
        """Note a request that begins to run, if it has siblings that wait for it."""
        if request.forks:
            self._parents.append(request)

    def fork(self) -> None:
        """Queue the siblings of sequences whose prompt is computed, with the blocks of the prompt.

        Each recomputes the prompt's last token, to sample its own first token from its logits.
        """
        for parent in self._parents:
            if parent.slot is None or parent.num_computed_tokens < parent.num_prompt_tokens:
                continue
            for child in parent.forks:
                self._kv_cache.fork(parent, child, parent.num_prompt_tokens)
                child.num_computed_tokens = parent.num_prompt_tokens - 1
                child.num_cached_tokens = parent.num_cached_tokens
                self._waiting.push(child)
            self._states.shares_tail[parent.slot] = True
            parent.forks = []
        self._parents = [each for each in self._parents if each.forks and each.slot is not None]
