"""WaitingQueues: the waiting sequences, by the blocks that they hold and by rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, takewhile

from engine.core.queue.keyed_heap import KeyedHeap
from engine.core.queue.queue_limits import Load, QueueLimits
from engine.core.queue.rank import Rank
from engine.core.queue.tenant_shares import TenantShares
from engine.core.request import Request

_Turn = tuple[int, tuple[int, int], Rank]  # priority, share of the tenant, rank


class WaitingQueues:
    """Three queues with one order over all of them.

    The next to run is of the tenant with the fewest running sequences, of several that whose turn
    was longest ago, and of a tenant's the first in rank: so each gets as many slots as any other.
    Before them come, by rank, beams for which other beams of their search hold slots, and sequences
    that were bypassed by so many later ones that they are overdue. The first that waits is bypassed
    by `MAX_BYPASSED` admissions at most, so that every one is admitted in the end.

    Attributes:
        queued: requests that have not been admitted yet, each as its first sequence.
        paused: admitted sequences without blocks: preempted ones, and forks whose blocks were
            reclaimed.
        forked: sequences that hold the blocks of their prompt and have not run yet.
        held: uid, index -> sequence that is not ready to run; in no queue.
        queued_load: of the requests in `queued`.
    """

    def __init__(self, rank: Callable[[Request], Rank], shares: TenantShares) -> None:
        """Order by `rank`, smaller first, whose first number is the priority.

        Args:
            rank: of a sequence; unique, and the same while it waits.
            shares: of those that run, kept up to date by the caller.
        """
        self._rank = rank
        self._shares = shares
        self.queued, self.paused, self.forked = (TenantQueue(rank) for _ in range(3))
        self._queues = (self.queued, self.paused, self.forked)
        self.held: dict[tuple[int, int], Request] = {}
        self._passed_over: set[Request] = set()
        # Of what is not passed over: what comes first, and the rest with the tenants by turn.
        self._urgent, self._ready = TenantQueue(rank), TenantQueue(rank)
        self._turns: KeyedHeap[_Turn] = KeyedHeap()
        self.queued_load = Load()
        self._tenant_loads: defaultdict[str, Load] = defaultdict(Load)  # of `queued`

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __bool__(self) -> bool:
        return any(self._queues)

    def __iter__(self) -> Iterator[Request]:
        """Yield all waiting sequences, queue by queue."""
        return chain(*self._queues)

    @property
    def head(self) -> Request | None:
        """The next sequence to run, None if none waits that is not passed over."""
        while self._shares.changed:
            self._set_turn(self._shares.changed.pop())
        tenant, urgent = self._turns.first(), self._urgent.first
        first = None if tenant is None else self._ready.first_of(tenant)
        if urgent is None or first is None:
            return urgent or first
        return urgent if self._rank(urgent)[0] <= self._rank(first)[0] else first

    def _set_turn(self, tenant: str) -> None:
        """Place a tenant among the others: by priority, then share, then rank of its first."""
        if (first := self._ready.first_of(tenant)) is None:
            self._turns.discard(tenant)
        else:
            rank = self._rank(first)
            self._turns.set(tenant, (rank[0], self._shares.of(tenant), rank))

    def load_without_slot(self, num_free_slots: int) -> Load:
        """Return the load of queued requests that do not fit into the free slots."""
        num_free = max(0, num_free_slots - len(self.paused) - len(self.forked))
        if self.queued_load.num_sequences <= num_free:
            return Load()
        num_sequences = num_tokens = 0
        for request in self.queued if num_free else ():
            if num_sequences >= num_free:
                break
            num_sequences += request.sampling_params.num_sequences
            num_tokens += request.num_prompt_tokens
        return self.queued_load - Load(min(num_sequences, num_free), num_tokens)

    def displaced_by(self, new: Request, limits: QueueLimits, num_free_slots: int) -> list[Request]:
        """Return the queued requests to refuse so that `new` may wait, the last in order first.

        Those of lower priority are displaced, then those of tenants that have more queued than its
        own would have; none is if even all would not suffice.

        Raises:
            QueueFullError: there is no room for `new`.
        """
        displaced: list[Request] = []
        load, waiting = _load(new), self.load_without_slot(num_free_slots)
        priority, *_ = self._rank(new)
        lower = takewhile(lambda each: self._rank(each)[0] > priority, reversed(self.queued))
        candidates = chain(lower, self._beyond_share(new, limits))
        while not limits.have_room(waiting, load):
            if (request := next(candidates, None)) is None:
                limits.check(self.load_without_slot(num_free_slots), load)
                break
            displaced.append(request)
            waiting = (waiting - _load(request)).beyond(Load())
        return displaced

    def _beyond_share(self, new: Request, limits: QueueLimits) -> Iterator[Request]:
        """Yield requests of `new`'s priority that give way to it, for it has fewer queued.

        Each is the last of the tenant that has most, which then still has as much as `new`'s.
        """
        priority, *_ = self._rank(new)
        own = limits.share(self._tenant_loads.get(new.tenant, Load()) + _load(new))
        loads = dict(self._tenant_loads)
        num_taken = dict.fromkeys(loads, 0)  # how many of the last are taken already
        while loads:
            tenant = max(loads, key=lambda each: limits.share(loads[each]))
            queue = self.queued.of(tenant)
            num_taken[tenant] += 1
            request = queue[-num_taken[tenant]] if num_taken[tenant] <= len(queue) else None
            if request is None or self._rank(request)[0] < priority:
                del loads[tenant]
                continue
            loads[tenant] -= _load(request)
            if limits.share(loads[tenant]) < own:
                return
            if self._rank(request)[0] == priority:  # lower ones have been displaced already
                yield request

    def push(self, request: Request) -> None:
        """Queue `request`. Its state must not change until it is removed."""
        self._queue_of(request).push(request)
        self._enter(request)
        if _is_new(request):
            self._count(request.tenant, _load(request))

    def admit(self, request: Request) -> None:
        """Remove `request`, which is to run, and count that it bypasses an earlier one."""
        self.discard(request)
        first = self._ready.first
        if first is not None and self._rank(first) < self._rank(request):
            first.times.num_bypassed += 1
            if first.is_overdue:
                self.refresh([first, *first.companions])

    def refresh(self, requests: Iterable[Request]) -> None:
        """Note that some sequences may have become urgent, or are no longer."""
        for request in requests:
            if self._leave(request):
                self._enter(request)

    def pass_over(self, request: Request) -> None:
        """Let others run before `request`, which stays in its queue."""
        self._passed_over.add(request)
        self._leave(request)

    def take_back(self, request: Request) -> None:
        """Pass `request` over no longer, if it still waits."""
        if request in self._passed_over:
            self._passed_over.remove(request)
            self._enter(request)

    def hold(self, *requests: Request) -> None:
        """Keep sequences until they are ready to run; they are in no other's way."""
        self.held.update(((each.uid, each.index), each) for each in requests)

    def release(self, uid: int) -> None:
        """Queue the first sequence of a request, which is held."""
        self.push(self.held.pop((uid, 0)))

    def discard(self, request: Request) -> None:
        """Remove `request`, if it is queued or held."""
        self.held.pop((request.uid, request.index), None)
        self._passed_over.discard(request)
        self._leave(request)
        if self._queue_of(request).discard(request) and _is_new(request):
            self._count(request.tenant, Load() - _load(request))

    def pop_last_fork(self) -> Request | None:
        """Remove the last sequence of `forked` in rank, and return it; None if there is none."""
        last = next(reversed(self.forked), None)
        if last is not None:
            self.discard(last)
        return last

    def check_integrity(self) -> None:
        """Assert that each sequence waits in the queue of its state, in order, and is counted."""
        loads: defaultdict[str, Load] = defaultdict(Load)
        for queue in self._queues:
            queue.check_integrity()
            assert all(self._queue_of(request) is queue for request in queue)
        assert self._passed_over.issubset(self)
        self._check_head()
        for request in self.queued:
            loads[request.tenant] += _load(request)
        assert self._tenant_loads == loads
        assert self.queued_load == sum(loads.values(), Load())

    def _check_head(self) -> None:
        """Assert that `head` is what a scan of all sequences finds."""
        ready = set(self) - self._passed_over
        urgent = {each for each in ready if _is_urgent(each)}
        for queue, members in ((self._urgent, urgent), (self._ready, ready - urgent)):
            queue.check_integrity()
            assert set(queue) == members

        def turn(request: Request) -> tuple[int, tuple[int, int], Rank]:
            rank = self._rank(request)
            return rank[0], (-1, 0) if request in urgent else self._shares.of(request.tenant), rank

        assert self.head is min(ready, key=turn, default=None)

    def _enter(self, request: Request) -> None:
        if _is_urgent(request):
            self._urgent.push(request)
        else:
            self._ready.push(request)
            self._set_turn(request.tenant)

    def _leave(self, request: Request) -> bool:
        """Return whether `request` was in line to be admitted."""
        if self._urgent.discard(request):
            return True
        was_ready = self._ready.discard(request)
        if was_ready:
            self._set_turn(request.tenant)
        return was_ready

    def _count(self, tenant: str, load: Load) -> None:
        self.queued_load += load
        self._tenant_loads[tenant] += load
        if self._tenant_loads[tenant] == Load():
            del self._tenant_loads[tenant]

    def _queue_of(self, request: Request) -> TenantQueue:
        if request.kv.tables:
            return self.forked
        return self.queued if _is_new(request) else self.paused


def _is_urgent(request: Request) -> bool:
    """Whether `request` comes before other tenants' turns."""
    return request.is_overdue or request.is_awaited


def _is_new(request: Request) -> bool:
    """Whether no sequence of the request has been admitted: `index` 0 is the first to be."""
    return request.index == 0 and request.times.first_scheduled is None


def _load(request: Request) -> Load:
    return Load(request.sampling_params.num_sequences, request.num_prompt_tokens)


class TenantQueue:
    """Waiting sequences in order of rank, smaller first: found, added and removed in O(log n)."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        """Order by `rank`; ranks are unique and do not change while a sequence waits."""
        self._rank = rank
        self._all: list[Request] = []
        self._by_tenant: dict[str, list[Request]] = {}  # none is empty

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        """Yield the sequences of all tenants by rank."""
        return iter(self._all)

    def __reversed__(self) -> Iterator[Request]:
        """Yield the sequences of all tenants, the last in rank first."""
        return reversed(self._all)

    @property
    def first(self) -> Request | None:
        """The first sequence in rank, None if the queue is empty."""
        return self._all[0] if self._all else None

    def first_of(self, tenant: str) -> Request | None:
        """Return the first sequence of one tenant, None if it has none."""
        queue = self._by_tenant.get(tenant)
        return queue[0] if queue else None

    def of(self, tenant: str) -> list[Request]:
        """Return the sequences of one tenant, by rank; they are not to be changed."""
        return self._by_tenant.get(tenant, [])

    def push(self, request: Request) -> None:
        """Add `request`. Its rank must not change until it is removed."""
        insort(self._all, request, key=self._rank)
        insort(self._by_tenant.setdefault(request.tenant, []), request, key=self._rank)

    def discard(self, request: Request) -> bool:
        """Remove `request`; return whether it was here."""
        queue = self.of(request.tenant)
        if not self._remove(queue, request):
            return False
        if not queue:
            del self._by_tenant[request.tenant]
        return self._remove(self._all, request)

    def _remove(self, queue: list[Request], request: Request) -> bool:
        position = bisect_left(queue, self._rank(request), key=self._rank)
        if position == len(queue) or queue[position] is not request:
            return False
        del queue[position]
        return True

    def check_integrity(self) -> None:
        """Assert that each sequence is in its tenant's part, and all are in order."""
        assert self._all == sorted(self._all, key=self._rank)
        for tenant, queue in self._by_tenant.items():
            assert queue
            assert queue == [each for each in self._all if each.tenant == tenant]
        assert len(self._all) == sum(map(len, self._by_tenant.values()))
