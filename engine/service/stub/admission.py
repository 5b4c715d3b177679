"""Admission of requests: limits the engine's load, and refuses requests that crash it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

from engine.config.engine_config import EngineConfig
from engine.core.queue.keyed_heap import KeyedHeap
from engine.core.queue.queue_limits import Load, QueueLimits
from engine.errors import SuspectRequestError
from engine.protocol.messages import Ready

K = TypeVar("K")

_MAX_DEATHS = 2
_MEMORY_S = 600.0  # then a request may try again: it may have been a bystander both times
_MAX_REMEMBERED = 16_384  # fingerprints; the oldest are forgotten first


class PoisonRequestGuard:
    """Refuses requests that were in flight each time the engine process crashed.

    Counts crashes per request, by `NewRequest.fingerprint`, because clients retry.

    A request that was in flight at two of them in a row is refused for a while. One that finishes
    in between is cleared: it was not the cause. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # how many, the last
        self._lock = threading.Lock()

    def check(self, fingerprint: bytes) -> None:
        """Raise `SuspectRequestError` if this request must not reach the engine again."""
        with self._lock:
            self._forget()
            deaths, _ = self._deaths.get(fingerprint, (0, 0.0))
        if deaths >= _MAX_DEATHS:
            raise SuspectRequestError(
                f"refused: the engine process died each of the {deaths} times that it ran this "
                "request"
            )

    def blame(self, fingerprints: Iterable[bytes]) -> None:
        """Count a death against each request that was in flight."""
        with self._lock:
            for fingerprint in set(fingerprints):
                deaths, _ = self._deaths.pop(fingerprint, (0, 0.0))
                self._deaths[fingerprint] = (deaths + 1, self._clock())
            self._forget()

    def clear(self, fingerprint: bytes) -> None:
        """Forget the crashes of a request, because it has finished."""
        with self._lock:
            self._deaths.pop(fingerprint, None)

    def _forget(self) -> None:
        oldest = self._clock() - _MEMORY_S
        while self._deaths and (
            len(self._deaths) > _MAX_REMEMBERED or next(iter(self._deaths.values()))[1] < oldest
        ):
            self._deaths.popitem(last=False)


class Admission:
    """Counts the unfinished requests of the engine process, and refuses more than the limits.

    The engine counts waiting requests itself, but only between steps. Here, all beyond its slots
    count as waiting: in its queue, preempted, in its inbox or in the socket. Not thread-safe.

    A request that is of higher priority, with scheduling_policy=priority, or of a tenant that has
    less here than another, passes up to twice the limits: the engine refuses others for it.
    """

    def __init__(self, config: EngineConfig, ready: Ready) -> None:
        """Start empty, for an engine that has just become ready."""
        limits = QueueLimits.of(
            config,
            kv_cache_tokens=ready.kv_cache_tokens,
            max_num_seqs=ready.max_num_seqs,
        )
        self._limits = limits
        self._hard_limits = QueueLimits(2 * limits.max_sequences, 2 * limits.max_tokens)
        self._has_priorities = config.scheduling_policy == "priority"
        self._max_running = Load(ready.max_num_seqs, ready.max_num_seqs * ready.max_model_len)
        self.load = Load()
        self._by_priority: dict[int, Load] = {}
        self._by_tenant: dict[str, Load] = {}
        self._largest: KeyedHeap[float] = KeyedHeap()  # tenants, by what they have

    def enter(self, new: Load, priority: int = 0, tenant: str = "") -> None:
        """Count a request in.

        Raises:
            QueueFullError: the limit of waiting sequences or prompt tokens is reached.
        """
        waiting = self.load.beyond(self._max_running)
        if not (
            self._limits.have_room(waiting, new)
            or (
                self._hard_limits.have_room(waiting, new)
                and self._may_displace(new, priority, tenant)
            )
        ):
            self._limits.check(waiting, new)
        self._count(new, priority, tenant)

    def _may_displace(self, new: Load, priority: int, tenant: str) -> bool:
        """Whether the engine may refuse others for a request, if there is no room for all."""
        if self._has_priorities:
            ahead = (load for each, load in self._by_priority.items() if each <= priority)
            if self._limits.have_room(sum(ahead, Load()).beyond(self._max_running), new):
                return True
        own = self._limits.share(self._by_tenant.get(tenant, Load()) + new)
        most = self._largest.first()
        return most is not None and self._limits.share(self._by_tenant[most]) > own

    def leave(self, old: Load, priority: int = 0, tenant: str = "") -> None:
        """Count a request out: the process has said that it has ended."""
        self._count(Load() - old, priority, tenant)

    def _count(self, change: Load, priority: int, tenant: str) -> None:
        self.load += change
        _add(self._by_priority, priority, change)
        _add(self._by_tenant, tenant, change)
        if tenant in self._by_tenant:
            self._largest.set(tenant, -self._limits.share(self._by_tenant[tenant]))
        else:
            self._largest.discard(tenant)


def _add(loads: dict[K, Load], key: K, change: Load) -> None:
    """Change one of `loads`, of which none is empty."""
    load = loads.pop(key, Load()) + change
    assert min(load.num_sequences, load.num_tokens) >= 0
    if load != Load():
        loads[key] = load
