"""Admission of waiting requests to a step, and the chunk sizes of running prefills."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from enum import Enum
from heapq import heappop, heappush
from operator import gt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.core.kv.prefix_cache import Prefix
from engine.core.kv.state_manager import StateManager
from engine.core.queue.waiting_queues import WaitingQueues
from engine.core.request import Request
from engine.core.schedule_builder import ScheduleBuilder
from engine.core.seq_slots import SeqSlots

_PART_LEFT = 4  # of the tokens that a prefill could have in a step, one in so many

_MAX_BLOCKS = 256  # ahead for which a request waits before it is looked up again


class Admitted(NamedTuple):
    """How a request begins to run.

    Attributes:
        prefix: what the prefix cache has of it.
        start: number of its first tokens whose KV exists already.
        num_tokens: tokens to compute in this step.
    """

    prefix: Prefix
    start: int
    num_tokens: int


class Refused(Enum):
    """Why a request cannot run in this step."""

    NO_ROOM = "too few blocks are free, or tokens left of a step in which all of it must be"
    PASSED_OVER = "a running request is computing more of the same prefix"


class _Blocked(NamedTuple):
    """A request that was refused, and the conditions for considering it again."""

    request: Request
    missing_hash: bytes | None  # of a block that would be a hit in the prefix cache
    budget: float  # tokens that must be left in the step's budget
    num_free: tuple[int, int]  # blocks, and states, that were free


class PromptAdmission:
    """Admits a request only when all of its tokens fit beside the running requests.

    A prompt that fits only in part would be preempted after some steps, and start over. A refused
    one is considered again when a sequence has ended, when more blocks or states are free, when
    more of it is in the prefix cache, or when nothing runs; this costs time in proportion to its
    prefix.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        states: SeqSlots,
        waiting: WaitingQueues,
        *,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool,
        long_prefill_token_threshold: int,
    ) -> None:
        """Admit from `waiting` beside those in `states`; the limits are those of `EngineConfig`."""
        self._kv_cache = kv_cache
        self._states = states
        self._waiting = waiting
        self._prefixes = InBatchPrefixCaching(states, waiting, kv_cache)
        self._enable_chunked_prefill = enable_chunked_prefill
        self._max_num_batched_tokens = max_num_batched_tokens
        self._threshold = long_prefill_token_threshold
        self._max_chunk = long_prefill_token_threshold or max_num_batched_tokens
        self._blocked: _Blocked | None = None

    def chunks(self, slots: NDArray[np.int32], num_left: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return how many of their tokens left the sequences in `slots` compute in a step.

        One token is reserved for each, so that a long prefill never stalls a decode; and if a
        request could be admitted, a part of what is left, so that none waits for a long prefill.
        """
        num_new = np.ones_like(num_left)
        num_spare = self._max_num_batched_tokens - len(num_left)
        prefills = (num_left > 1).nonzero()[0].tolist()
        leaves_some = bool(prefills) and self._may_admit()
        for row in prefills:
            num_kept = num_spare // _PART_LEFT if leaves_some else 0
            whole = self._whole(self._states.owner(slots[row]), int(num_left[row]))
            num_new[row] = self._chunk(whole, 1 + num_spare - num_kept)
            num_spare -= int(num_new[row]) - 1
        return num_new

    def _may_admit(self) -> bool:
        """Whether a request waits that nothing but the budget of a step may keep out."""
        if not (self._enable_chunked_prefill and self._states.free):
            return False
        head = self._waiting.head
        return head is not None and not self.lacks_blocks(head)

    def _whole(self, request: Request, num_left: int) -> int:
        """Return how many of its tokens left a request may compute in one step.

        Its forks begin before its last token; where layers keep states, they need the one there.
        """
        ends_before = self._kv_cache.states is not None and bool(request.forks) and num_left > 1
        return num_left - ends_before

    def _chunk(self, num_tokens: int, budget: int) -> int:
        """Return how many of `num_tokens` one request may compute in a step."""
        if num_tokens == 1:
            return 1
        return min(num_tokens, self._threshold or budget, budget)

    def begin(self, step: ScheduleBuilder) -> None:
        """Begin the admissions to a step; the running requests have their tokens already."""
        self._prefixes.begin(step)

    def reconsider(self) -> None:
        """Consider the refused request again: less is kept in reserve since a sequence left."""
        self._blocked = None

    def lacks_blocks(self, request: Request) -> bool:
        """Whether too few blocks were free for `request`, and no more are since."""
        return self._refused(request) == math.inf

    def _refused(self, request: Request) -> float:
        """Return the budget with which to consider `request` again; 0: with any."""
        blocked = self._blocked
        if (
            blocked is None
            or blocked.request is not request
            or any(map(gt, self._num_free(), blocked.num_free))
            or self._kv_cache.prefix_cache.has_block(blocked.missing_hash)
        ):
            return 0
        return blocked.budget

    def _num_free(self) -> tuple[int, int]:
        states = self._kv_cache.states
        return self._kv_cache.pool.num_free, 0 if states is None else states.pool.num_free

    def consider(self, request: Request, budget: int) -> Admitted | Refused:
        """Decide on the first waiting request, for a step that has `budget` tokens left."""
        running = self._states.in_use()
        if len(running) and budget < self._refused(request):
            return Refused.NO_ROOM
        prefix = self._kv_cache.prefix_cache.find(request)
        if self._prefixes.pass_over(request, prefix):
            return Refused.PASSED_OVER
        start = max(prefix.num_tokens, request.num_computed_tokens)
        if self._kv_cache.states is None:  # else a state must be there
            start = max(start, request.kv.num_swapped_tokens)
        num_left = request.num_tokens - start
        whole = self._whole(request, num_left)
        num_tokens = self._chunk(whole, budget)
        if not self._has_room(request, prefix, num_left, running):
            least_budget = math.inf
        elif num_tokens < whole and not self._enable_chunked_prefill:
            least_budget = whole
        else:
            return Admitted(prefix, start, num_tokens)
        self._blocked = _Blocked(request, prefix.missing, least_budget, self._num_free())
        return Refused.NO_ROOM

    def runs(self, request: Request) -> None:
        """Note that `request` has been admitted, and has its tokens of this step."""
        self._prefixes.runs(request)

    def _has_room(
        self, request: Request, prefix: Prefix, num_left: int, running: NDArray[np.int32]
    ) -> bool:
        """Whether there are free blocks for all tokens of `request`, and a reserve.

        The reserve is what all running requests need until the prompt is computed, and at least
        for the tokens of one block, so that the admission preempts none of them at once.
        """
        if self._kv_cache.states is not None and not self._kv_cache.states.has_room(
            request, prefix.state
        ):
            return False
        num_missing = self._kv_cache.num_missing_blocks(request, prefix.tables)
        num_spare = self._kv_cache.pool.num_free - num_missing
        if not len(running):
            return num_spare >= 0
        states, size = self._states, self._kv_cache.block_size
        num_steps = max(size, -(-num_left // self._max_chunk))
        num_tokens = states.num_tokens[running] + states.num_unread_tokens[running]
        # The last token of a sequence is never computed.
        ends = np.minimum(num_tokens + num_steps, states.max_num_tokens[running] - 1)
        windows, reserve = self._kv_cache.windows, 0
        for window, count in windows.counts.items():
            held = states.reserved if window is None else states.capacity
            grown = -(-ends // size) - held[running] // size
            if window is not None:
                most = windows.most_blocks(window, states.token_ids.shape[1])
                grown = np.minimum(grown, most)
            reserve += count * int(np.maximum(grown, 0).sum())
        end = min(request.num_tokens + num_steps, request.max_num_tokens - 1)
        own = windows.sequence_blocks(end) - windows.sequence_blocks(request.num_tokens)
        return num_spare >= max(0, own) + reserve


class _Wait(NamedTuple):
    """A request waits until the first `num_blocks` blocks of another one are computed."""

    num_blocks: int
    number: int  # unique, so that requests are not compared
    request: Request


class InBatchPrefixCaching:
    """Passes over waiting requests whose next blocks a running request computes.

    When those that they share are computed, or the other has left, they may run again: the blocks
    are then a hit in the prefix cache. Meanwhile they are not looked up.

    Where layers keep states, a hit needs the one where the two part. The running request is asked
    for a checkpoint there, if it is not beyond it, and the other waits until that is found.
    """

    def __init__(self, states: SeqSlots, waiting: WaitingQueues, kv_cache: KVCacheManager) -> None:
        """Pass over requests in `waiting` for the sequences in `states`."""
        self._states = states
        self._waiting = waiting
        self._prefix_cache = kv_cache.prefix_cache
        self._state_manager = kv_cache.states
        self._block_size = kv_cache.block_size
        self._waits: defaultdict[Request, list[_Wait]] = defaultdict(list)  # heaps, by the other
        self._numbers = itertools.count()
        self._step: ScheduleBuilder | None = None
        # Of running prefills, by the hash of the block that each completes next; None: not looked
        # up in this step yet. Where layers keep states: by the hash of the first block.
        self._computing: dict[bytes, list[Request]] | None = None

    def begin(self, step: ScheduleBuilder) -> None:
        """Begin the admissions to a step; the running requests have their tokens already."""
        self._computing = None
        self._step = step
        for running in list(self._waits):
            waits = self._waits[running]
            while waits and self._is_over(waits[0], running):
                self._waiting.take_back(heappop(waits).request)
            if not waits:
                del self._waits[running]

    def _is_over(self, wait: _Wait, running: Request) -> bool:
        num_tokens = wait.num_blocks * self._block_size
        if running.slot is None:
            return True
        is_computed = running.num_computed_tokens // self._block_size >= wait.num_blocks
        return is_computed and num_tokens not in running.kv.saves

    def pass_over(self, request: Request, prefix: Prefix) -> bool:
        """Pass over `request`, of which `prefix` is cached, if one that runs will have more of it.

        Returns whether it was.
        """
        if self._state_manager is not None:
            return self._await_state(request, prefix, self._state_manager)
        if prefix.missing is None or not (found := self._computed_by().get(prefix.missing)):
            return False
        running = found[-1]
        start = running.num_computed_tokens // self._block_size
        num_blocks = self._prefix_cache.num_common_blocks(request, running, start + _MAX_BLOCKS)
        self._wait(request, running, num_blocks)
        return True

    def _wait(self, request: Request, running: Request, num_blocks: int) -> None:
        heappush(self._waits[running], _Wait(num_blocks, next(self._numbers), request))
        self._waiting.pass_over(request)

    def _await_state(self, request: Request, prefix: Prefix, states: StateManager) -> bool:
        first = self._prefix_cache.first_hash(request)
        if first is None or not (found := self._computed_by().get(first)):
            return False
        blocks = states.interval // self._block_size
        shared: list[tuple[int, Request]] = []
        for running in found:
            start = running.num_computed_tokens // self._block_size
            common = self._prefix_cache.num_common_blocks(request, running, start + _MAX_BLOCKS)
            if (length := common // blocks * blocks) * self._block_size > prefix.num_tokens:
                shared.append((length, running))
        for length, running in sorted(shared, key=lambda each: -each[0]):
            if self._will_have_state(running, length * self._block_size, states):
                self._wait(request, running, length)
                return True
        return False

    def _will_have_state(self, running: Request, position: int, states: StateManager) -> bool:
        """Whether a running request writes a checkpoint there, as it may be asked to."""
        assert self._step is not None
        if position > running.num_computed_tokens:
            running.kv.wanted.add(position)
            return True
        if position in running.kv.saves:
            return True
        return self._step.add_save(running, position, states)

    def runs(self, request: Request) -> None:
        """Note that `request` has been admitted, and has its tokens of this step."""
        if self._computing is not None and (key := self._key(request)) is not None:
            self._computing.setdefault(key, []).append(request)

    def _key(self, running: Request) -> bytes | None:
        if self._state_manager is None:
            return self._prefix_cache.computing_hash(running)
        return self._prefix_cache.first_hash(running)

    def _computed_by(self) -> dict[bytes, list[Request]]:
        if self._computing is None:
            states, size = self._states, self._block_size
            running = states.in_use()
            num_full = states.num_tokens[running] // size
            prefills = running[states.num_computed_tokens[running] // size < num_full]
            owners = [states.owner(slot) for slot in prefills]
            if self._state_manager is not None:
                owners = self._with_saves(running)
            self._computing = {}
            for owner in owners:
                if (key := self._key(owner)) is not None:
                    self._computing.setdefault(key, []).append(owner)
        return self._computing

    def _with_saves(self, running: NDArray[np.int32]) -> list[Request]:
        """Return the running sequences that may still get a checkpoint in their prompts."""
        assert self._step is not None
        owners = [self._states.owner(slot) for slot in running.tolist()]
        return [
            owner
            for owner in owners
            if owner.num_computed_tokens < owner.num_prompt_tokens
            or owner.kv.saves
            or owner.slot in self._step.chunks
        ]
