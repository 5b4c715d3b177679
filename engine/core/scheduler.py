"""Scheduler: decides which tokens each step computes, and what the sampled ones mean."""

from __future__ import annotations

from bisect import insort
from collections.abc import KeysView, Sequence
from typing import Literal

from engine.core.kv_cache_manager import BlockCopy, KVCacheManager
from engine.core.ranked_queue import Rank, RankedQueue
from engine.core.request import Request, SampledToken
from engine.core.schedule import Schedule, ScheduledRequest


class Scheduler:
    """Continuous batching with chunked prefill in one token budget.

    Each request just catches `num_computed_tokens` up to `num_tokens`: running requests first,
    then waiting ones in policy order. When blocks run out, the last running request is preempted:
    its KV moves to the host if there is room, and otherwise is recomputed when the request is back.

    A step may be scheduled before the tokens of the step before have been read (`update`). Then it
    may have rows of sequences that turn out to have ended; what comes of these is dropped. Blocks
    and slots that are given back while steps are in flight may go to others at once: the device
    runs the steps in their order, so that the next owner's step begins when those are over.

    Attributes:
        queued: requests that have not been admitted yet, each as its first sequence.
        paused: sequences of admitted requests that wait: forks, and preempted ones.
        running: sequences that take part in each step, in policy order.
        num_queued_tokens: prompt tokens of `queued`.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        policy: Literal["fcfs", "priority"] = "fcfs",
    ) -> None:
        """Schedule on `kv_cache`; the limits are those of `EngineConfig`."""
        assert max_num_batched_tokens >= max_num_seqs
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.policy = policy
        self.queued = RankedQueue(self._rank)
        self.paused = RankedQueue(self._rank)
        self.running: list[Request] = []
        self.num_queued_tokens = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # prompt tokens that were looked up in the prefix cache
        self.num_prefix_hits = 0  # of them, those found
        self._unfinished: dict[int, dict[int, Request]] = {}  # uid -> index -> sequence
        self._free_slots = list(reversed(range(max_num_seqs)))
        # What the next step swaps out: block of the host -> block of the device.
        self._swap_out: dict[int, int] = {}

    def _rank(self, request: Request) -> Rank:
        """Smaller runs earlier. uids grow with arrival, so a preempted request comes back first."""
        priority = request.priority if self.policy == "priority" else 0
        return (priority, request.uid, request.index)

    def add(self, siblings: Sequence[Request]) -> None:
        """Queue the sequences of one request; the first computes the prompt for all of them."""
        first, *others = siblings
        first.forks = others
        self._unfinished[first.uid] = {request.index: request for request in siblings}
        self.queued.push(first)
        self.num_queued_tokens += first.num_prompt_tokens

    @property
    def unfinished(self) -> KeysView[int]:
        """A live view of the uids of all requests that have a sequence left."""
        return self._unfinished.keys()

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run now; forks that have not started yet are left out."""
        return len(self.queued) + len(self.paused)

    @property
    def requests(self) -> list[Request]:
        """Everything unfinished; forks that have not started yet are left out."""
        return [*self.running, *self.paused, *self.queued]

    @property
    def num_sequences(self) -> int:
        """Everything unfinished, forks that have not started yet too."""
        return sum(map(len, self._unfinished.values()))

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._unfinished)

    def schedule(self) -> Schedule:
        """Choose the tokens of the next step and allocate the blocks for them.

        No row at all is left while all that run must be read first, or there is nothing to do.
        """
        rows: list[ScheduledRequest] = []
        copies: list[BlockCopy] = []
        swap_in: list[BlockCopy] = []
        budget = self.max_num_batched_tokens
        num_preemptions = self.num_preemptions

        place = 0
        while place < len(self.running):
            request = self.running[place]
            place += 1
            if request.must_be_read:
                continue
            # One token stays reserved for each running request behind this one, so that a long
            # prefill never stalls a decode.
            reserved = len(self.running) - place
            num_tokens = self._chunk(request, budget - reserved)
            num_blocks = len(request.kv.block_ids)
            block_copies = self._allocate_or_preempt(request, num_tokens)
            if block_copies is None:
                break  # the request was itself the last one, and is preempted
            copies += block_copies
            rows.append(self._row(request, num_tokens, 0 if block_copies else num_blocks))
            budget -= num_tokens

        # Admitting somebody right after a preemption would only take the blocks away again.
        if self.num_preemptions == num_preemptions:
            self._admit(rows, copies, swap_in, budget)
            assert self.running or not self.num_waiting, "a request that can never fit was let in"
        if not all(row.is_decode for row in rows):
            rows.sort(key=lambda row: (row.num_tokens > 1, not row.wants_token))
            for row in rows:
                self._share_prompt(row.request)
        return Schedule(rows, self._take_swap_out() if rows else [], copies, swap_in)

    def _take_swap_out(self) -> list[BlockCopy]:
        swap_out = [BlockCopy(source, host) for host, source in self._swap_out.items()]
        self._swap_out = {}
        return swap_out

    def _share_prompt(self, request: Request) -> None:
        """Let others have the blocks of a prompt, or of a part of it, from the next step on."""
        self.kv_cache.commit(request)
        if request.forks and request.num_computed_tokens >= request.num_prompt_tokens:
            self._fork(request)

    def _admit(
        self,
        rows: list[ScheduledRequest],
        copies: list[BlockCopy],
        swap_in: list[BlockCopy],
        budget: int,
    ) -> None:
        while budget > 0 and len(self.running) < self.max_num_seqs:
            request = self._next_waiting()
            if request is None:
                return
            assert request.num_unread_tokens == 0
            reused = not request.kv.block_ids
            if reused:
                num_cached_tokens = self.kv_cache.reuse_prefix(request)
                request.num_computed_tokens = max(num_cached_tokens, request.kv.num_swapped_tokens)
            num_shared = len(request.kv.block_ids)
            num_tokens = self._chunk(request, budget)
            whole = num_tokens == request.num_uncomputed_tokens
            block_copies = None
            if self.enable_chunked_prefill or whole:
                block_copies = self.kv_cache.allocate(request, num_tokens)
            if block_copies is None:
                if reused:
                    self._reset(request)
                if rows or not self._reclaim_from_paused():
                    return
                continue
            if request.times.first_scheduled is None:
                if reused and self.kv_cache.enable_prefix_caching:
                    self.num_prefix_queries += request.num_prompt_tokens
                    self.num_prefix_hits += request.num_computed_tokens
                request.mark_scheduled()
            copies += block_copies
            swap_in += self.kv_cache.swap_in(request, num_shared)
            self._discard_waiting(request)
            request.slot = self._free_slots.pop()
            rows.append(self._row(request, num_tokens, None))
            budget -= num_tokens
            insort(self.running, request, key=self._rank)

    def _next_waiting(self) -> Request | None:
        heads = [head for queue in (self.queued, self.paused) if (head := queue.head) is not None]
        return min(heads, key=self._rank, default=None)

    def _discard_waiting(self, request: Request) -> bool:
        """Take `request` out of the queue that it waits in; False if it does not wait."""
        if self.queued.discard(request):
            self.num_queued_tokens -= request.num_prompt_tokens
            return True
        return self.paused.discard(request)

    def _chunk(self, request: Request, budget: int) -> int:
        num_tokens = request.num_uncomputed_tokens
        if num_tokens == 1:
            return 1
        return min(num_tokens, self.long_prefill_token_threshold or budget, budget)

    def _row(
        self, request: Request, num_tokens: int, first_changed_block: int | None
    ) -> ScheduledRequest:
        """Return the row, and count its tokens as computed."""
        assert request.slot is not None
        start = request.num_computed_tokens
        wants_token = num_tokens == request.num_uncomputed_tokens
        request.num_computed_tokens += num_tokens
        request.num_unread_tokens += wants_token
        return ScheduledRequest(
            request, request.slot, start, num_tokens, wants_token, first_changed_block
        )

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[BlockCopy] | None:
        while (copies := self.kv_cache.allocate(request, num_tokens)) is None:
            if self._reclaim_from_paused():
                continue
            victim = self.running.pop()
            # Carried out with the next step that has a row, which may be a later one than this.
            for source, host in self.kv_cache.swap_out(victim) or ():
                self._swap_out[host] = source
            self._reset(victim)
            self._free_slot(victim)
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self.paused.push(victim)
            if victim is request:
                return None
        return copies

    def _reclaim_from_paused(self) -> bool:
        """Take the blocks of the last fork that waits with some; False if none does."""
        for request in reversed(self.paused):
            if request.kv.block_ids:
                self._reset(request)
                return True
        return False

    def _reset(self, request: Request) -> None:
        self.kv_cache.free(request)
        request.num_computed_tokens = 0

    def _free_slot(self, request: Request) -> None:
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None

    def update(self, schedule: Schedule, sampled: Sequence[SampledToken]) -> list[Request]:
        """Read the tokens of a step; return the requests that got one.

        Steps are read in the order in which they were scheduled. `sampled` has one entry for each
        row that wants a token, in order; those of sequences that have ended meanwhile are dropped.
        Finished requests, and those that failed, have given back their blocks and left the queues.
        """
        advanced = []
        waiting = (row.request for row in schedule.rows if row.wants_token)
        for request, token in zip(waiting, sampled, strict=True):
            request.num_unread_tokens -= 1
            if request.finish_reason is not None:
                continue
            self.kv_cache.commit(request)  # the token's own KV is computed only if it is not last
            try:
                request.append(token)
            except Exception as error:  # the stop search runs the tokenizer on the request's data
                request.fail(error)
            advanced.append(request)
        self._retire([request for request in advanced if request.finish_reason is not None])
        return advanced

    def _fork(self, parent: Request) -> None:
        """Queue the siblings on the blocks of the prompt.

        Each recomputes the prompt's last token, whose logits it samples its own first token from.
        """
        for child in parent.forks:
            self.kv_cache.fork(parent, child, parent.num_prompt_tokens)
            child.num_computed_tokens = parent.num_prompt_tokens - 1
            child.num_cached_tokens = parent.num_cached_tokens
            self.paused.push(child)
        parent.forks = []

    def abort(self, uid: int) -> list[Request]:
        """End all sequences of a request and free their blocks; return them."""
        siblings = list(self._unfinished.get(uid, {}).values())
        for request in siblings:
            request.forks = []
            request.abort()
        self._retire(siblings)
        return siblings

    def _retire(self, finished: Sequence[Request]) -> None:
        """Free what finished sequences hold, and forget them."""
        if not finished:
            return
        for request in finished:
            if request.slot is None:
                self._discard_waiting(request)
            else:
                self._free_slot(request)
            self.kv_cache.free(request)
            self.kv_cache.discard_swapped(request)
            siblings = self._unfinished[request.uid]
            del siblings[request.index]
            if not siblings:
                del self._unfinished[request.uid]
        self.running = [request for request in self.running if request.finish_reason is None]

    def check_idle(self) -> None:
        """Assert that nothing is held while there is no request; the work is constant."""
        assert not any((self._unfinished, self.running, self.queued, self.paused))
        assert self.num_queued_tokens == 0
        assert len(self._free_slots) == self.max_num_seqs
        self.kv_cache.check_idle()

    def check_integrity(self) -> None:
        """Assert that the queues, the counters and the block accounting agree.

        Looks at every request and block: for tests and diagnosis.
        """
        for queue in (self.queued, self.paused, self.running):
            assert list(queue) == sorted(queue, key=self._rank)
        slots = [request.slot for request in self.running] + self._free_slots
        assert sorted(slot for slot in slots if slot is not None) == list(range(self.max_num_seqs))
        assert all(request.slot is None for request in (*self.queued, *self.paused))
        assert self.num_queued_tokens == sum(r.num_prompt_tokens for r in self.queued)
        for request in self.queued:
            assert request.times.first_scheduled is None
            assert not request.kv.block_ids
        sequences = self.requests
        sequences += [fork for request in sequences for fork in request.forks]
        assert {(r.uid, r.index): r for r in sequences} == {
            (uid, index): request
            for uid, siblings in self._unfinished.items()
            for index, request in siblings.items()
        }
        self.kv_cache.check_integrity(self.requests)
