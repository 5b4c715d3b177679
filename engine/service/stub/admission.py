"""Admission: how much may be with the engine process at once, its inbox and its socket included."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.core.queue_limits import Load, QueueLimits
from engine.protocol import Ready


class Admission:
    """Counts what the engine process has been given and has not ended, and refuses too much.

    The engine itself counts what waits, but only between steps. Here, all that cannot be running
    must be waiting: in its queue, preempted, in its inbox or in the socket. Not thread-safe.
    """

    def __init__(self, config: EngineConfig, ready: Ready) -> None:
        """Start with nothing, for an engine that has just become ready."""
        self._limits = QueueLimits.of(config, (ready.num_blocks - 1) * ready.block_size)
        self._max_running = Load(config.max_num_seqs, config.max_num_seqs * ready.max_model_len)
        self.load = Load()

    def enter(self, new: Load) -> None:
        """Count a request in.

        Raises:
            QueueFullError: as many sequences or prompt tokens are waiting as may wait.
        """
        self._limits.check(self.load.beyond(self._max_running), new)
        self.load += new

    def leave(self, old: Load) -> None:
        """Count a request out: the process has said that it has ended."""
        self.load -= old
        assert min(self.load.num_sequences, self.load.num_tokens) >= 0
