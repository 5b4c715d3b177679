"""Admission: limits the load of the engine process, including its inbox and its socket."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.core.queue_limits import Load, QueueLimits
from engine.protocol import Ready


class Admission:
    """Counts the unfinished requests of the engine process, and refuses more than the limits.

    The engine counts waiting requests itself, but only between steps. Here, all beyond its slots
    count as waiting: in its queue, preempted, in its inbox or in the socket. Not thread-safe.

    With scheduling_policy=priority, requests of lower priority do not count against one: the engine
    refuses as many of them as necessary. Until then, up to twice the limits may be counted here.
    """

    def __init__(self, config: EngineConfig, ready: Ready) -> None:
        """Start empty, for an engine that has just become ready."""
        limits = QueueLimits.of(
            config,
            kv_cache_tokens=(ready.num_blocks - 1) * ready.block_size,
            max_num_seqs=ready.max_num_seqs,
        )
        self._limits = limits
        self._hard_limits = QueueLimits(2 * limits.max_sequences, 2 * limits.max_tokens)
        self._by_priority = config.scheduling_policy == "priority"
        self._max_running = Load(ready.max_num_seqs, ready.max_num_seqs * ready.max_model_len)
        self.load = Load()
        self._loads: dict[int, Load] = {}  # by priority

    def enter(self, new: Load, priority: int = 0) -> None:
        """Count a request in.

        Raises:
            QueueFullError: the limit of waiting sequences or prompt tokens is reached.
        """
        waiting = self.load.beyond(self._max_running)
        if not (self._by_priority and self._hard_limits.have_room(waiting, new)):
            self._limits.check(waiting, new)
        elif not self._limits.have_room(waiting, new):
            ahead = (load for each, load in self._loads.items() if each <= priority)
            self._limits.check(sum(ahead, Load()).beyond(self._max_running), new)
        self.load += new
        self._loads[priority] = self._loads.get(priority, Load()) + new

    def leave(self, old: Load, priority: int = 0) -> None:
        """Count a request out: the process has said that it has ended."""
        self.load -= old
        left = self._loads.pop(priority) - old
        assert min(left.num_sequences, left.num_tokens) >= 0
        if left != Load():
            self._loads[priority] = left
