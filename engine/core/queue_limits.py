"""QueueLimits: when a request is turned away because too much is waiting already."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import QueueFullError


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many requests may wait, and how many prompt tokens they may have together."""

    max_requests: int
    max_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, kv_cache_tokens: int) -> QueueLimits:
        """Return the limits of `config` for a KV cache of so many tokens.

        By default the queue holds as many prompts as sequences of the length that the cache was
        made for: only longer ones meet the limit of tokens before that of requests.
        """
        requests, tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
        if tokens is None:
            tokens = max(1, kv_cache_tokens * requests // config.max_num_seqs)
        return cls(requests, tokens)

    def check(self, num_requests: int, num_tokens: int, num_new_tokens: int) -> None:
        """Raise `QueueFullError` if one more may not join those that wait.

        A request with more tokens than the limit is let into an empty queue.
        """
        if num_requests >= self.max_requests:
            raise _full(f"{self.max_requests} requests", "max_num_queued_reqs")
        if num_requests and num_tokens + num_new_tokens > self.max_tokens:
            raise _full(f"{self.max_tokens} prompt tokens", "max_num_queued_tokens")


def _full(limit: str, setting: str) -> QueueFullError:
    return QueueFullError(f"Maximum queue size of {limit} reached ({setting}); try again later")
