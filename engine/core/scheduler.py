"""Scheduler: decides which tokens each step computes, and processes the sampled ones."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Literal

from engine.core.kv_cache_manager import BlockCopy, KVCacheManager
from engine.core.prompt_admission import Admitted, PromptAdmission, Refused
from engine.core.ranked_queue import Rank
from engine.core.request import Request
from engine.core.samples import sampled_tokens
from engine.core.sampling_constraints import SamplingConstraints
from engine.core.schedule import Samples, Schedule
from engine.core.schedule_builder import ScheduleBuilder, ScheduledRow
from engine.core.waiting_queues import WaitingQueues

_MAX_PASSED_OVER = 8  # requests per step: each is looked up in the prefix cache again


class Scheduler:
    """Continuous batching with chunked prefill in one token budget.

    Each request advances `num_computed_tokens` up to `num_tokens`: running requests first, then
    waiting ones in policy order. A request is admitted when there are blocks for all of its tokens,
    which are allocated at once, and a reserve for the running ones. When blocks run out
    nevertheless, the last running request is preempted: its KV is swapped out to the host if there
    is room, and otherwise recomputed when the request resumes.

    A step may be scheduled before the tokens of the step before have been read (`update`). Then it
    may have rows of sequences that turn out to have ended; their results are dropped. Blocks and
    slots freed while steps are in flight may be allocated again at once: the device runs the steps
    in order, so that the next owner's step begins when those are over.

    Attributes:
        waiting: sequences that do not run.
        running: sequences that take part in each step, in policy order.
        unfinished: uid -> index -> sequence, including forks that have not started.
        free_slots: rows of the device's tables without a running sequence.
        constraints: what the host forbids running sequences.
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
        self.policy = policy
        self._admission = PromptAdmission(
            kv_cache,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        self.waiting = WaitingQueues(self.rank)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # prompt tokens that were looked up in the prefix cache
        self.num_prefix_hits = 0  # those of them found
        self.unfinished: dict[int, dict[int, Request]] = {}
        self.free_slots = list(reversed(range(max_num_seqs)))
        # What the next step swaps out: block of the host -> block of the device.
        self._swap_out: dict[int, int] = {}
        # The sequences that get a token in each step in flight, in the order of its rows.
        self._in_flight: deque[list[Request]] = deque()
        self.constraints = SamplingConstraints()

    def rank(self, request: Request) -> Rank:
        """Smaller runs earlier. uids grow with arrival, so a preempted request resumes first."""
        priority = request.priority if self.policy == "priority" else 0
        return (priority, request.uid, request.index)

    def add(self, siblings: Sequence[Request]) -> None:
        """Queue the sequences of one request; the first computes the prompt for all of them."""
        first, *others = siblings
        first.forks = others
        self.unfinished[first.uid] = {request.index: request for request in siblings}
        self.waiting.push(first)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self.unfinished)

    def schedule(self) -> Schedule:
        """Choose the tokens of the next step and allocate the blocks for them.

        There is no row if all running sequences must be read first, or there is nothing to do.
        """
        step = ScheduleBuilder()
        num_preemptions = self.num_preemptions
        budget = self._advance_running(step)
        # An admission right after a preemption would take the freed blocks again.
        if self.num_preemptions == num_preemptions:
            self._admit(step, budget)
            assert self.running or not self.waiting, "a request that can never fit was let in"
        if not step.is_decode:
            for row in step.sort_rows():
                self._fork(row.request)
        if step.rows:
            step.swap_out.extend(map(BlockCopy, self._swap_out.values(), self._swap_out))
            self._swap_out.clear()
            self._in_flight.append([row.request for row in step.rows if row.wants_token])
        return step.build()

    def _advance_running(self, step: ScheduleBuilder) -> int:
        """Schedule the next tokens of the running requests; return the budget that is left."""
        budget = self.max_num_batched_tokens
        place = 0
        while place < len(self.running):
            request = self.running[place]
            place += 1
            if request.must_be_read:
                continue
            # One token is reserved for each running request after this one, so that a long prefill
            # never stalls a decode.
            reserved = len(self.running) - place
            num_tokens = self._admission.chunk(request.num_uncomputed_tokens, budget - reserved)
            num_blocks = len(request.kv.block_ids)
            copies = self._allocate_or_preempt(request, num_tokens)
            if copies is None:
                break  # the request was itself the last one, and is preempted
            step.copies.extend(copies)
            self._add_row(step, request, num_tokens)
            step.write_blocks(request, 0 if copies else num_blocks)
            budget -= num_tokens
        return budget

    def _admit(self, step: ScheduleBuilder, budget: int) -> None:
        """Admit waiting sequences, in policy order, while slots, blocks and `budget` last.

        One with a prefix that a running one is about to compute is passed over until then: its
        blocks are then a hit in the prefix cache.
        """
        if not self.waiting:
            return
        passed_over: list[Request] = []
        self._admission.begin()
        while (
            budget > 0
            and len(self.running) < self.max_num_seqs
            and len(passed_over) < _MAX_PASSED_OVER
            and (request := self.waiting.head) is not None
        ):
            answer = self._admission.consider(request, self.running, budget)
            if isinstance(answer, Admitted):
                self._run(request, answer, step)
                budget -= answer.num_tokens
            elif answer is Refused.PASSED_OVER:
                self.waiting.discard(request)
                passed_over.append(request)
            elif self.running or not self._reclaim_from_forks():
                break
        for request in passed_over:
            self.waiting.push(request)

    def _run(self, request: Request, admitted: Admitted, step: ScheduleBuilder) -> None:
        """Move `request` from its queue to `running`, with a slot and blocks for all its tokens."""
        self.waiting.discard(request)
        is_fork = bool(request.kv.block_ids)
        if not is_fork:
            self.kv_cache.reuse_prefix(request, admitted.prefix)
        request.num_computed_tokens = admitted.start
        copies = self.kv_cache.allocate(request, request.num_uncomputed_tokens)
        assert copies is not None
        if request.times.first_scheduled is None:
            if self.kv_cache.enable_prefix_caching and not is_fork:
                self.num_prefix_queries += request.num_prompt_tokens
                self.num_prefix_hits += admitted.start
            request.mark_scheduled()
        step.copies.extend(copies)
        step.swap_in.extend(self.kv_cache.swap_in(request, len(admitted.prefix)))
        request.slot = self.free_slots.pop()
        step.admit(request, admitted.start)
        self.constraints.add(request.slot, request)
        self._add_row(step, request, admitted.num_tokens)
        insort(self.running, request, key=self.rank)
        self._admission.runs(request)

    def _add_row(self, step: ScheduleBuilder, request: Request, num_tokens: int) -> None:
        """Add the next tokens of `request` to the step, and count them as computed.

        Others admitted in this step can share blocks that it fills: a layer writes all KV first.
        """
        wants_token = num_tokens == request.num_uncomputed_tokens
        request.num_computed_tokens += num_tokens
        request.num_unread_tokens += wants_token
        step.rows.append(ScheduledRow(request, num_tokens, wants_token))
        if num_tokens > 1:
            self.kv_cache.commit(request)

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[BlockCopy] | None:
        """Return the copies to make before the step; None if `request` itself was preempted."""
        while (copies := self.kv_cache.allocate(request, num_tokens)) is None:
            if self._reclaim_from_forks():
                continue
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None
        return copies

    def _preempt(self, victim: Request) -> None:
        # Carried out before the next step that has a row, possibly a later one.
        for source, host in self.kv_cache.swap_out(victim) or ():
            self._swap_out[host] = source
        self._give_up_blocks(victim)
        self._free_slot(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(victim)

    def _reclaim_from_forks(self) -> bool:
        """Free the blocks of the last waiting fork that has some; False if none has."""
        fork = self.waiting.forked.tail
        if fork is None:
            return False
        self.waiting.discard(fork)
        self._give_up_blocks(fork)
        self.waiting.push(fork)
        return True

    def _give_up_blocks(self, request: Request) -> None:
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        self._admission.blocks_were_freed()

    def _free_slot(self, request: Request) -> None:
        assert request.slot is not None
        self.constraints.discard(request.slot)
        self.free_slots.append(request.slot)
        request.slot = None

    def update(self, samples: Samples) -> list[Request]:
        """Read the tokens of the oldest step in flight; return the sequences that go on or end."""
        advanced = []
        for request, token in zip(self._in_flight.popleft(), sampled_tokens(samples), strict=True):
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
        """Queue the siblings with the blocks of the prompt, if it is computed.

        Each recomputes the prompt's last token, to sample its own first token from its logits.
        """
        if parent.num_computed_tokens < parent.num_prompt_tokens:
            return
        for child in parent.forks:
            self.kv_cache.fork(parent, child, parent.num_prompt_tokens)
            child.num_computed_tokens = parent.num_prompt_tokens - 1
            child.num_cached_tokens = parent.num_cached_tokens
            self.waiting.push(child)
        parent.forks = []

    def abort(self, uid: int) -> list[Request]:
        """End all sequences of a request and free their blocks; return them."""
        siblings = list(self.unfinished.get(uid, {}).values())
        for request in siblings:
            request.forks = []
            request.abort()
        self._retire(siblings)
        return siblings

    def _retire(self, finished: Sequence[Request]) -> None:
        """Free the blocks and slots of finished sequences, and remove them."""
        if not finished:
            return
        for request in finished:
            if request.slot is None:
                self.waiting.discard(request)
            else:
                self._free_slot(request)
            self._give_up_blocks(request)
            self.kv_cache.discard_swapped(request)
            siblings = self.unfinished[request.uid]
            del siblings[request.index]
            if not siblings:
                del self.unfinished[request.uid]
        self.running = [request for request in self.running if request.finish_reason is None]
