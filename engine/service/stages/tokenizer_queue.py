"""TokenizerQueue: requests that wait for the tokenizer, by tenant and bounded."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config.engine_config import EngineConfig
from engine.errors import QueueFullError
from engine.fair_executor import FairExecutor
from engine.service.tensors import Tensors

_MOST_SEQS = 256  # `max_num_seqs` where it is not set, on any device
_MAX_BYTES = 2**27  # of one tenant's input tensors that wait; the server holds them once more
_MAX_SMALL_BYTES = 2**16  # some 20,000 tokens, in some 50 ms
_REQUEST_BYTES = 2**10  # what a request without any costs

Answer = Callable[[], None]


@dataclass(slots=True)
class _Load:
    """Requests that wait, and the bytes of their inputs."""

    num_requests: int = 0
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A request until it has been answered, and what is to be called then."""

    answer: Answer
    followers: list[Answer] = field(default_factory=list)


class TokenizerQueue:
    """Tenants are served in turn, by the bytes of their requests, and small ones beside a large.

    Without it requests would wait in Triton's own queue before the model, which has no limit.

    One tenant may fill the queue up to its limits; several together up to twice of them, so that
    there is always room for one who has little in it.
    """

    def __init__(self, max_requests: int, max_bytes: int = _MAX_BYTES) -> None:
        """At most `max_requests` of one tenant, of `max_bytes` together, wait."""
        self.max_requests = max_requests
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._total = _Load()
        self._loads: defaultdict[str, _Load] = defaultdict(_Load)  # by tenant
        self._newest: dict[str, _Entry] = {}  # by request id
        self._closed = False
        self._executor = FairExecutor("tokenizer", max_small_cost=_REQUEST_BYTES + _MAX_SMALL_BYTES)

    @classmethod
    def of(cls, config: EngineConfig) -> TokenizerQueue:
        """Return a queue for as many requests as the engine's queue and its slots take.

        The device decides how many slots there are if the settings do not. It is not known here:
        then room is left for the most.
        """
        return cls(config.max_num_queued_reqs + (config.max_num_seqs or _MOST_SEQS))

    def put(
        self, answer: Answer, num_bytes: int, *, tenant: str = "", request_id: str = ""
    ) -> None:
        """Have `answer` called in a worker thread; it keeps `num_bytes` until then.

        Where nothing waits any request may, even one that exceeds the limit of bytes by itself.

        Raises:
            QueueFullError: as much is waiting as may wait.
        """
        entry = _Entry(answer)
        with self._lock:
            self._check(self._loads.get(tenant, _Load()), num_bytes)
            self._count(tenant, 1, num_bytes)
            if request_id:
                self._newest[request_id] = entry
            self._executor.submit(
                lambda: self._run(entry, num_bytes, tenant, request_id),
                cost=_REQUEST_BYTES + num_bytes,
                tenant=tenant,
            )

    def put_after(self, answer: Answer, request_id: str) -> None:
        """Have `answer` called when the request of this id that came last has been answered.

        Raises:
            QueueFullError: as `put`.
        """
        with self._lock:
            entry = self._newest.get(request_id)
            if entry is not None:
                if len(entry.followers) == self.max_requests:
                    raise _full(f"{self.max_requests} requests")
                entry.followers.append(answer)
                return
        self.put(answer, 0)

    def close(self) -> None:
        """Answer what waits, then end the worker threads."""
        with self._lock:
            self._closed = True
        self._executor.close()

    def _check(self, own: _Load, num_bytes: int) -> None:
        if self._closed:
            raise QueueFullError("the tokenizer takes no more requests: the server is closing")
        if own.num_requests + self._total.num_requests + 2 > 2 * self.max_requests:
            raise _full(f"{self.max_requests} requests")
        together = own.num_bytes + self._total.num_bytes + 2 * num_bytes
        if self._total.num_requests and together > 2 * self._max_bytes:
            raise _full(f"{self._max_bytes} bytes")

    def _count(self, tenant: str, num_requests: int, num_bytes: int) -> None:
        for load in (self._total, self._loads[tenant]):
            load.num_requests += num_requests
            load.num_bytes += num_bytes
        if not self._loads[tenant].num_requests:
            del self._loads[tenant]

    def _run(self, entry: _Entry, num_bytes: int, tenant: str, request_id: str) -> None:
        with self._lock:
            self._count(tenant, -1, -num_bytes)
        try:
            entry.answer()
        finally:
            with self._lock:
                if self._newest.get(request_id) is entry:
                    del self._newest[request_id]
            for follower in entry.followers:  # nothing finds the entry any more to add another
                follower()


def size_of(tensors: Tensors) -> int:
    """Return how many bytes `tensors` hold; strings count with their text."""
    return sum(
        sum(map(len, array.flat)) if array.dtype.kind == "O" else array.nbytes
        for array in tensors.values()
    )


def _full(limit: str) -> QueueFullError:
    return QueueFullError(
        f"Maximum queue size of {limit} reached (before the tokenizer); try again later"
    )
