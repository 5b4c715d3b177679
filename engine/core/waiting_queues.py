"""WaitingQueues: the sequences that do not run, by the blocks that they hold."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import chain, takewhile

from engine.core.queue_limits import Load, QueueLimits
from engine.core.request import Request

Rank = tuple[int, int, int]


class WaitingQueues:
    """Three sorted lists with one order over all of them.

    Attributes:
        queued: requests that have not been admitted yet, each as its first sequence.
        paused: admitted sequences without blocks: preempted ones, and forks whose blocks were
            reclaimed.
        forked: sequences that hold the blocks of their prompt and have not run yet.
        held: uid, index -> sequence that is not ready to run; in no queue.
        queued_load: of the requests in `queued`.
    """

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        """Order by `rank`, smaller first; ranks are unique and do not change."""
        self._rank = rank
        self.queued: list[Request] = []
        self.paused: list[Request] = []
        self.forked: list[Request] = []
        self._queues = (self.queued, self.paused, self.forked)
        self.held: dict[tuple[int, int], Request] = {}
        self.queued_load = Load()

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[Request]:
        """Yield all waiting sequences, queue by queue."""
        return chain(*self._queues)

    @property
    def head(self) -> Request | None:
        """The next sequence to run, None if none waits."""
        return min((queue[0] for queue in self._queues if queue), key=self._rank, default=None)

    def load_without_slot(self, num_free_slots: int) -> Load:
        """Return the load of queued requests that do not fit into the free slots."""
        num_free = max(0, num_free_slots - len(self.paused) - len(self.forked))
        if self.queued_load.num_sequences <= num_free:
            return Load()
        num_sequences = num_tokens = 0
        for request in self.queued:
            if num_sequences >= num_free:
                break
            num_sequences += request.sampling_params.num_sequences
            num_tokens += request.num_prompt_tokens
        return self.queued_load - Load(min(num_sequences, num_free), num_tokens)

    def displaced_by(self, new: Request, limits: QueueLimits, num_free_slots: int) -> list[Request]:
        """Return the queued requests to refuse so that `new` may wait, the last in order first.

        Only requests of lower priority are displaced, and none if even all would not suffice.

        Raises:
            QueueFullError: there is no room for `new`.
        """
        displaced: list[Request] = []
        load, waiting = _load(new), self.load_without_slot(num_free_slots)
        priority, *_ = self._rank(new)
        lower = takewhile(lambda each: self._rank(each)[0] > priority, reversed(self.queued))
        while not limits.have_room(waiting, load):
            if (request := next(lower, None)) is None:
                limits.check(self.load_without_slot(num_free_slots), load)
                break
            displaced.append(request)
            waiting = (waiting - _load(request)).beyond(Load())
        return displaced

    def push(self, request: Request) -> None:
        """Queue `request`. Its state must not change until it is removed."""
        insort(self._queue_of(request), request, key=self._rank)
        if _is_new(request):
            self.queued_load += _load(request)

    def hold(self, *requests: Request) -> None:
        """Keep sequences until they are ready to run; they are in no other's way."""
        self.held.update(((each.uid, each.index), each) for each in requests)

    def release(self, uid: int) -> None:
        """Queue the first sequence of a request, which is held."""
        self.push(self.held.pop((uid, 0)))

    def discard(self, request: Request) -> None:
        """Remove `request`, if it is queued or held."""
        self.held.pop((request.uid, request.index), None)
        queue = self._queue_of(request)
        place = bisect_left(queue, self._rank(request), key=self._rank)
        if place < len(queue) and queue[place] is request:
            del queue[place]
            if _is_new(request):
                self.queued_load -= _load(request)

    def check_integrity(self) -> None:
        """Assert that each sequence waits in the queue of its state, in order, and is counted."""
        for queue in self._queues:
            assert queue == sorted(queue, key=self._rank)
            assert all(self._queue_of(request) is queue for request in queue)
        assert self.queued_load == sum(map(_load, self.queued), Load())

    def _queue_of(self, request: Request) -> list[Request]:
        if request.kv.block_ids:
            return self.forked
        return self.queued if _is_new(request) else self.paused


def _is_new(request: Request) -> bool:
    """Whether no sequence of the request has been admitted: `index` 0 is the first to be."""
    return request.index == 0 and request.times.first_scheduled is None


def _load(request: Request) -> Load:
    return Load(request.sampling_params.num_sequences, request.num_prompt_tokens)
