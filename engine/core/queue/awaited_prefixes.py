"""AwaitedPrefixes: waiting requests whose prefix a running one is computing."""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from engine.core.kv.prefix_cache import PrefixCache
from engine.core.queue.waiting_queues import WaitingQueues
from engine.core.request import Request
from engine.core.slot_states import SlotStates

_MAX_PLACES = 256  # ahead for which a request waits before it is looked up again


class _Wait(NamedTuple):
    """A request waits until the first `num_places` blocks of another one are computed."""

    num_places: int
    number: int  # unique, so that requests are not compared
    request: Request


class AwaitedPrefixes:
    """Passes over requests whose next blocks a running request computes.

    When those that they share are computed, or the other has left, they may run again: the blocks
    are then a hit in the prefix cache. Meanwhile they are not looked up.
    """

    def __init__(
        self, states: SlotStates, waiting: WaitingQueues, prefix_cache: PrefixCache, block_size: int
    ) -> None:
        """Pass over requests in `waiting` for the sequences in `states`."""
        self._states = states
        self._waiting = waiting
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._waits: defaultdict[Request, list[_Wait]] = defaultdict(list)  # heaps, by the other
        self._numbers = count()
        # Of running prefills, by the hash of the block that each completes next; None: not looked
        # up in this step yet.
        self._computing: dict[bytes, Request] | None = None

    def begin(self) -> None:
        """Begin the admissions of a step; the running requests have their tokens already."""
        self._computing = None
        for running in list(self._waits):
            num_places = running.num_computed_tokens // self._block_size
            waits = self._waits[running]
            while waits and (running.slot is None or waits[0].num_places <= num_places):
                self._waiting.take_back(heappop(waits).request)
            if not waits:
                del self._waits[running]

    def pass_over(self, request: Request, missing_hash: bytes | None) -> bool:
        """Pass over `request` if one that runs completes the block `missing_hash` next.

        Returns whether it was.
        """
        if missing_hash is None or (running := self._computed_by().get(missing_hash)) is None:
            return False
        start = running.num_computed_tokens // self._block_size
        num_places = self._prefix_cache.num_common_places(request, running, start + _MAX_PLACES)
        heappush(self._waits[running], _Wait(num_places, next(self._numbers), request))
        self._waiting.pass_over(request)
        return True

    def runs(self, request: Request) -> None:
        """Note that `request` has been admitted, and has its tokens of this step."""
        content_hash = self._prefix_cache.computing_hash(request)
        if self._computing is not None and content_hash is not None:
            self._computing[content_hash] = request

    def _computed_by(self) -> dict[bytes, Request]:
        if self._computing is None:
            states, size = self._states, self._block_size
            running = states.in_use()
            num_full = states.num_tokens[running] // size
            prefills = running[states.num_computed_tokens[running] // size < num_full]
            owners = [states.owner(slot) for slot in prefills]
            hashes = map(self._prefix_cache.computing_hash, owners)
            self._computing = {
                each: owner for each, owner in zip(hashes, owners, strict=True) if each is not None
            }
        return self._computing
