"""Admission: limits the load of the engine process, including its inbox and its socket."""

from __future__ import annotations

from collections import defaultdict

from engine.config.engine_config import EngineConfig
from engine.core.queue.queue_limits import Load, QueueLimits
from engine.protocol.messages import Ready


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
        self._by_priority = config.scheduling_policy == "priority"
        self._max_running = Load(ready.max_num_seqs, ready.max_num_seqs * ready.max_model_len)
        self.load = Load()
        self._loads: dict[tuple[int, str], Load] = {}  # by priority and tenant

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
        self.load += new
        self._loads[priority, tenant] = self._loads.get((priority, tenant), Load()) + new

    def _may_displace(self, new: Load, priority: int, tenant: str) -> bool:
        """Whether the engine may refuse others for a request, if there is no room for all."""
        if self._by_priority:
            ahead = (load for (each, _), load in self._loads.items() if each <= priority)
            if self._limits.have_room(sum(ahead, Load()).beyond(self._max_running), new):
                return True
        loads: defaultdict[str, Load] = defaultdict(Load)
        for (_, each), load in self._loads.items():
            loads[each] += load
        own = self._limits.share(loads.pop(tenant, Load()) + new)
        return any(self._limits.share(load) > own for load in loads.values())

    def leave(self, old: Load, priority: int = 0, tenant: str = "") -> None:
        """Count a request out: the process has said that it has ended."""
        self.load -= old
        left = self._loads.pop((priority, tenant)) - old
        assert min(left.num_sequences, left.num_tokens) >= 0
        if left != Load():
            self._loads[priority, tenant] = left
