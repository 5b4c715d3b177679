"""Admission: how much may be with the engine process at once, its inbox and its socket included."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.core.queue_limits import QueueLimits
from engine.protocol import Ready
from engine.service.stub.delivery import NewRequest


class Admission:
    """Counts unfinished requests, and refuses more than can run and wait.

    The engine itself counts those that wait, but only between steps. Here, whatever cannot be
    running must be waiting: in its queue, preempted, or in its inbox. Not thread-safe.
    """

    def __init__(self, config: EngineConfig, ready: Ready) -> None:
        """Start with nothing, for an engine that has just become ready."""
        self._limits = QueueLimits.of(config, (ready.num_blocks - 1) * ready.block_size)
        self._max_running_requests = config.max_num_seqs
        self._max_running_tokens = config.max_num_seqs * ready.max_model_len
        self.num_requests = 0
        self.num_tokens = 0  # of their prompts

    def enter(self, request: NewRequest) -> None:
        """Count `request` in.

        Raises:
            QueueFullError: as many requests or prompt tokens are waiting as may wait.
        """
        num_new_tokens = len(request.prompt_token_ids)
        self._limits.check(
            max(0, self.num_requests - self._max_running_requests),
            max(0, self.num_tokens - self._max_running_tokens),
            num_new_tokens,
        )
        self.num_requests += 1
        self.num_tokens += num_new_tokens

    def leave(self, request: NewRequest) -> None:
        """Count `request` out: it has finished, or nobody waits for it any more."""
        self.num_requests -= 1
        self.num_tokens -= len(request.prompt_token_ids)
        assert self.num_requests >= 0
        assert self.num_tokens >= 0
