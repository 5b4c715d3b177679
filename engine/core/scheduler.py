"""Scheduler: decides which tokens each step computes, and processes the sampled ones."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.core.beams.beam_scheduler import BeamScheduler
from engine.core.constraints.mask_workers import MaskWorkers
from engine.core.constraints.sampling_constraints import SamplingConstraints
from engine.core.kv.kv_cache_manager import BlockCopy, KVCacheManager
from engine.core.queue.prompt_admission import Admitted, PromptAdmission, Refused
from engine.core.queue.queue_limits import Load
from engine.core.queue.rank import Rank, rank_by_priority, rank_fcfs
from engine.core.queue.tenant_shares import TenantShares
from engine.core.queue.waiting_queues import WaitingQueues
from engine.core.request import Request
from engine.core.schedule import SamplerOutput, SchedulerOutput
from engine.core.schedule_builder import ScheduleBuilder
from engine.core.seq_slots import FREE, SeqSlots
from engine.core.spec_decode.proposer import Proposer, SpecDecode
from engine.core.update_from_output import OutputUpdater, UpdateResult
from engine.nvtx import nvtx_range
from engine.text.byte_sets import ByteSets

_MAX_PASSED_OVER = 32  # requests per step: each is looked up in the prefix cache


class Scheduler:
    """Continuous batching with chunked prefill in one token budget.

    Each request advances `num_computed_tokens` up to `num_tokens`: running requests first, then
    waiting ones in policy order. A request is admitted when there are blocks for all of its tokens,
    which are allocated at once, and a reserve for the running ones. When blocks run out
    nevertheless, the last running request is preempted: its KV is swapped out to the host if there
    is room, and otherwise recomputed when the request resumes. A token that it has in flight is
    dropped, and drawn again from the same seed.

    Tenants share the slots equally, by the order of `waiting` and by who is preempted. A step may
    be scheduled before the tokens of the step before have been read (`update`), without drafts.
    Then it may have rows of sequences that turn out to have ended; their results are dropped.
    Blocks and slots freed while steps are in flight may be allocated again at once: the device runs
    the steps in order, so that the next owner's step begins when those are over.

    Attributes:
        rank: the order of sequences, by policy.
        waiting: sequences that do not run.
        running: sequences that take part in each step, in policy order.
        unfinished: uid -> index -> sequence, including forks that have not started.
        slots: what the host knows of the sequences in `running`.
        mask_workers: where their grammars follow the tokens.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        token_bytes: ByteSets,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        policy: Literal["fcfs", "priority"] = "fcfs",
        proposer: Proposer | None = None,
        mask_workers: MaskWorkers | None = None,
    ) -> None:
        """Schedule on `kv_cache`; `token_bytes` is `TokenFlags.byte_sets`, the rest is settings."""
        assert max_num_batched_tokens >= max_num_seqs
        self.kv_cache = kv_cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy
        self.rank = rank_by_priority if policy == "priority" else rank_fcfs
        self.slots = SeqSlots(max_num_seqs, max_model_len, kv_cache.block_size)
        self.mask_workers = mask_workers or MaskWorkers()
        self._output_updater = OutputUpdater(self.slots, kv_cache, token_bytes, self.mask_workers)
        self.constraints = SamplingConstraints(vocab_size=len(token_bytes))
        self.waiting = WaitingQueues(self.rank, self.slots.shares)
        self._admission = PromptAdmission(
            kv_cache,
            self.slots,
            self.waiting,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        limits = max_num_batched_tokens, long_prefill_token_threshold or max_num_batched_tokens
        self._spec_decode = SpecDecode(proposer, self.slots, kv_cache, self.waiting, *limits)
        self._preemption = PreemptionPolicy(self.rank, self.slots.shares)
        self._parallel_sampling = ParallelSampling(self.slots, kv_cache, self.waiting)
        self._beams = BeamScheduler(self.slots, kv_cache, self.waiting)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # prompt tokens that were looked up in the prefix cache
        self.num_prefix_hits = 0  # those of them found
        self.num_prefix_lost = 0  # those of them whose KV was found, but no state behind them
        self.unfinished: dict[int, dict[int, Request]] = {}
        self._running_slots: NDArray[np.int32] | None = None  # of `running`, if it is unchanged
        self._swap_out: dict[int, int] = {}  # in the next step: block of the host -> of the device

    def add(self, siblings: Sequence[Request], *, hold: bool = False) -> None:
        """Queue the sequences of one request; the first computes the prompt for all of them.

        With `hold` they wait until `waiting.release`.
        """
        first, *others = siblings
        first.forks = [each for each in others if not each.waits]
        self.waiting.hold(*(each for each in others if each.waits))
        self.unfinished[first.uid] = {request.index: request for request in siblings}
        (self.waiting.hold if hold else self.waiting.push)(first)

    @nvtx_range("schedule")
    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step and allocate the blocks for them.

        There is no row if all running sequences must be read first, or if there is nothing to do.
        """
        step = ScheduleBuilder(self.slots, keeps_states=self.kv_cache.states is not None)
        self._make_room()
        # An admission right after a preemption would take the freed blocks again.
        if self._advance_running(step):
            self._admit(step)
        while self.running and not (step.num_tokens or self._output_updater.is_busy):
            # All of them wait for sequences that do not fit beside them.
            self._preempt(self.running[-1])
            self._admit(step)
        assert self.running or not self.waiting, "a request that can never fit was let in"
        self._parallel_sampling.release()
        if step.num_tokens:
            step.swap_out += [BlockCopy(block, host) for host, block in self._swap_out.items()]
            self._swap_out.clear()
        schedule = self._spec_decode.launch(step.build())
        if self.kv_cache.states is not None:
            self.kv_cache.states.release_replaced()
        return self._output_updater.launch(schedule) if schedule.num_rows else schedule

    def _advance_running(self, step: ScheduleBuilder) -> bool:
        """Schedule the next tokens of the running sequences, all rows at once.

        Only those that need a block, or compute more than one token, are looked at one by one.
        Returns whether there were blocks for all of them.
        """
        states, num_preemptions = self.slots, self.num_preemptions
        if self._running_slots is None:
            self._running_slots = np.array([each.slot for each in self.running], dtype=np.int32)
        slots, num_left = states.ready(self._running_slots)
        num_new = self._admission.chunks(slots, num_left)
        num_new += (num_drafts := self._spec_decode.draft(slots, num_new))
        needs_block = states.num_computed_tokens[slots] + num_new > states.capacity[slots]
        for row in needs_block.nonzero()[0].tolist():
            # The last ones of the step may have been preempted for those before them.
            if (request := states.requests[slots[row]]) is not None:
                self._allocate_or_preempt(request, int(num_new[row]), step)
        if self.num_preemptions > num_preemptions:
            runs = states.serial[slots] != FREE
            slots, num_new, num_drafts = slots[runs], num_new[runs], num_drafts[runs]
        self._beams.rewrite(step)
        self._save_states(slots, num_new - num_drafts, step)
        step.add(slots, num_new, num_drafts)
        for slot in slots[num_new - num_drafts > 1].tolist():
            request = states.owner(slot)
            self.kv_cache.prefix_cache.commit(request, request.num_computed_tokens)
        return self.num_preemptions == num_preemptions

    def _save_states(
        self, slots: NDArray[np.int32], num_new: NDArray[np.int32], step: ScheduleBuilder
    ) -> None:
        """Choose the checkpoints of states that the rows of `step` write.

        Args:
            num_new: how many known tokens they compute.
        """
        if (states := self.kv_cache.states) is None or not self.kv_cache.prefix_cache.enabled:
            return
        starts = self.slots.num_state_tokens[slots]
        ends = self.slots.num_computed_tokens[slots] + num_new
        for row in (ends // states.interval > starts // states.interval).nonzero()[0].tolist():
            slot = int(slots[row])
            saves = states.save(self.slots.owner(slot), int(starts[row]), int(ends[row]))
            step.state_saves[slot] = saves

    def _admit(self, step: ScheduleBuilder) -> None:
        """Admit waiting sequences, in policy order, while slots, blocks and the budget last.

        One with a prefix that a running one is computing is passed over until then: its blocks are
        then a hit in the prefix cache.
        """
        if not self.waiting:
            return
        num_passed_over = 0
        self._admission.begin(step)
        while (
            (budget := self.max_num_batched_tokens - step.num_tokens) > 0
            and self.slots.free
            and num_passed_over < _MAX_PASSED_OVER
            and (request := self.waiting.head) is not None
        ):
            answer = self._admission.consider(request, budget)
            if isinstance(answer, Admitted):
                self._run(request, answer, step)
            elif answer is Refused.PASSED_OVER:
                num_passed_over += 1
            elif self.running or not self._parallel_sampling.reclaim():
                break

    def _run(self, request: Request, admitted: Admitted, step: ScheduleBuilder) -> None:
        """Move `request` from its queue to `running`, with a slot and blocks for all its tokens."""
        self.waiting.admit(request)
        is_fork = bool(request.kv.tables)
        self.kv_cache.reuse_prefix(request, admitted.prefix)
        request.num_computed_tokens = admitted.start
        copies = self.kv_cache.allocate(request, admitted.num_tokens, reserve=True)
        assert copies is not None
        self.kv_cache.prefix_cache.want_states(request, admitted.prefix)
        if request.times.first_scheduled is None:
            request.times.first_scheduled = time.monotonic()
            request.num_cached_tokens = admitted.start
            if self.kv_cache.prefix_cache.enabled and not (is_fork or request.prompt_scores):
                self.num_prefix_queries += request.num_prompt_tokens
                self.num_prefix_hits += admitted.start
                self.num_prefix_lost += admitted.prefix.num_lost
        step.copies.extend(copies)
        step.swap_in.extend(self.kv_cache.swap_in(request, admitted.prefix.tables))
        slot = self.slots.assign(request)
        self.waiting.refresh(request.companions)
        self.constraints.add(slot, request)
        self._output_updater.scorer.add(request)
        added = np.array([slot], np.int32), np.array([admitted.num_tokens], np.int32)
        self._save_states(*added, step)
        step.admit(request, admitted.num_tokens)
        self.kv_cache.prefix_cache.commit(request, request.num_computed_tokens)
        insort(self.running, request, key=self.rank)
        self._running_slots = None
        self._parallel_sampling.add(request)
        self._admission.runs(request)

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, step: ScheduleBuilder
    ) -> None:
        """Allocate blocks for the next tokens of a running request, or preempt it."""
        lengths = [len(table) for table in request.kv.tables]
        while (copies := self.kv_cache.allocate(request, num_tokens)) is None:
            if not self._parallel_sampling.reclaim():
                self._preempt(self._preemption.first(self.running, request))
                if request.slot is None:
                    return
        step.copies.extend(copies)
        step.write_blocks(request, None if copies else lengths)
        self.slots.set_blocks(request)

    def _make_room(self) -> None:
        """Preempt a sequence if the next to be admitted is of a tenant that has none running."""
        head = self.waiting.head
        if head is None or (self.slots.free and not self._admission.lacks_blocks(head)):
            return
        if (victim := self._preemption.for_newcomer(head, self.running)) is not None:
            self._preempt(victim)

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        # The token in flight will be drawn again, and the one before it computed again for that.
        victim.num_computed_tokens -= int(self.slots.num_unread_tokens[victim.slot])
        # Carried out before the next step that has a row, possibly a later one.
        for source, host in self.kv_cache.swap_out(victim) or ():
            self._swap_out[host] = source
        self._free(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        (self.waiting.hold if victim.waits else self.waiting.push)(victim)

    def _free(self, request: Request) -> None:
        """Take its blocks from a sequence, and its slot if it runs."""
        if request.slot is not None:
            self.constraints.discard(request.slot)
            self.slots.release(request)
            self.waiting.refresh(request.companions)
            self._running_slots = None
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        self._admission.reconsider()

    @property
    def is_late(self) -> bool:
        """Whether a token waits for its grammar; its sequence is in no step until then."""
        return self._output_updater.is_late

    @nvtx_range("update")
    def update(self, samples: SamplerOutput | None) -> UpdateResult:
        """Read the tokens of the oldest step that has not been read; return who got one.

        Finished and failed requests are freed and removed from the queues.

        Args:
            samples: None: there is no such step, and tokens wait for their grammars (`is_late`).
        """
        result = self._output_updater.update_from_output(samples)
        self._beams.advance(result)
        self._retire(result.finished)
        return result

    def cancel(self, schedule: SchedulerOutput) -> set[int]:
        """Take back the newest schedule, of which an unknown part has been carried out.

        Returns the uids of its sequences, which must be aborted: their KV is lost.
        """
        self._output_updater.cancel()
        lost = [self.slots.owner(slot) for slot in schedule.slots.tolist()]
        everyone = chain.from_iterable(each.values() for each in self.unfinished.values())
        self.kv_cache.lose(lost, schedule.swap_out[:, 1].tolist(), everyone)
        return {request.uid for request in lost}

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
        for request in finished:
            self.waiting.discard(request)
            self._free(request)
            self.kv_cache.discard_swapped(request)
            siblings = self.unfinished[request.uid]
            del siblings[request.index]
            if not siblings:
                del self.unfinished[request.uid]
        if finished:
            self.running = [request for request in self.running if request.finish is None]


class PreemptionPolicy:
    """Chooses the running sequence to preempt when others need its slot or its blocks.

    Of those of the lowest priority, it is the last in rank of the tenant with most: with one
    tenant, the last of all.
    """

    def __init__(self, rank: Callable[[Request], Rank], shares: TenantShares) -> None:
        """Choose by `rank`, whose first number is the priority, and by `shares`."""
        self._rank = rank
        self._num_running = shares.num_running

    def first(self, running: Sequence[Request], wants: Request) -> Request:
        """Return the sequence of `running`, in their order, to preempt so that `wants` gets blocks.

        Never one before `wants`: it may have got blocks in the same step, which are copied into
        before it.
        """
        index = bisect_left(running, self._rank(wants), key=self._rank)
        return max(running[index:], key=self._key)

    def for_newcomer(self, head: Request, running: Sequence[Request]) -> Request | None:
        """Return the sequence to preempt for the next waiting one, `head`; None if there is none.

        There is one only if the tenant of `head` has none running and another has several. One of
        higher priority is never chosen, nor one for which others would have to wait, nor one that
        was bypassed so often that it is overdue: it would be preempted again and again.
        """
        num_running = self._num_running
        if num_running[head.tenant]:
            return None
        several = (
            each
            for each in running
            if num_running[each.tenant] > 1 and not (each.is_awaited or each.is_overdue)
        )
        victim = max(several, key=self._key, default=None)
        if victim is None or self._rank(victim)[0] < self._rank(head)[0]:
            return None
        return victim

    def _key(self, request: Request) -> tuple[int, int, Rank]:
        rank = self._rank(request)
        return rank[0], self._num_running[request.tenant], rank


class ParallelSampling:
    """Lets the samples of a prompt (n > 1) share its blocks.

    They wait, as forks, until the first of them has computed the prompt.
    """

    def __init__(self, states: SeqSlots, kv_cache: KVCacheManager, waiting: WaitingQueues) -> None:
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
        # Layers that keep states have the one before the last token at the end of one step alone.
        left = self._kv_cache.states is not None
        for parent in self._parents:
            wanted = parent.num_prompt_tokens - left
            if parent.slot is not None and parent.num_computed_tokens >= wanted:
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


def check_idle(scheduler: Scheduler) -> None:
    """Assert that no block, slot or queue entry is held while there is no request.

    The engine calls it whenever it becomes idle: it compares counters only, in constant time.
    """
    assert not any(
        (scheduler.unfinished, scheduler.waiting.held, scheduler.running, scheduler.waiting)
    )
    assert scheduler.waiting.queued_load == Load()
    assert len(scheduler.slots.free) == len(scheduler.slots.serial)
    scheduler.kv_cache.check_idle()


def check_integrity(scheduler: Scheduler) -> None:
    """Assert that the queues, the counters and the block accounting agree.

    Scans every request and block: for tests and diagnosis.
    """
    running, waiting = scheduler.running, scheduler.waiting
    assert running == sorted(running, key=scheduler.rank)
    waiting.check_integrity()
    assert all(request.slot is None for request in waiting)
    scheduler.slots.check_integrity(running)
    sequences = [*running, *waiting, *waiting.held.values()]
    scheduler.kv_cache.check_integrity(sequences)
    sequences += [fork for request in sequences for fork in request.forks]
    assert {(r.uid, r.index): r for r in sequences} == {
        (uid, index): request
        for uid, siblings in scheduler.unfinished.items()
        for index, request in siblings.items()
    }
