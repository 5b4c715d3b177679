"""QueueLimits: when a request is turned away because too much is waiting already."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import QueueFullError

# About 150 MB as Python integers, in the engine process and while they are on the way to it.
_MAX_DEFAULT_TOKENS = 2**22


@dataclass(frozen=True, slots=True)
class Load:
    """What some requests amount to: their sequences, and the tokens of their prompts."""

    num_sequences: int = 0
    num_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.num_sequences + other.num_sequences, self.num_tokens + other.num_tokens)

    def __sub__(self, other: Load) -> Load:
        return Load(self.num_sequences - other.num_sequences, self.num_tokens - other.num_tokens)

    def beyond(self, limit: Load) -> Load:
        """Return what exceeds `limit`."""
        excess = self - limit
        return Load(max(0, excess.num_sequences), max(0, excess.num_tokens))


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many sequences may wait, and how many prompt tokens their requests may have together.

    What fits into free slots, and so runs in one of the next steps, does not count as waiting.
    """

    max_sequences: int
    max_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, kv_cache_tokens: int) -> QueueLimits:
        """Return the limits of `config` for a KV cache of so many tokens.

        By default the queue holds as many prompts as sequences of the length that the cache was
        made for: only longer ones meet the limit of tokens before that of sequences.
        """
        sequences, tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
        if tokens is None:
            tokens = max(1, kv_cache_tokens * sequences // config.max_num_seqs)
            tokens = min(tokens, _MAX_DEFAULT_TOKENS)
        return cls(sequences, tokens)

    def have_room(self, waiting: Load, new: Load) -> bool:
        """Whether the request `new` may join what is `waiting`.

        Where nothing waits any request may, even one that exceeds a limit by itself.
        """
        together = waiting + new
        return waiting.num_sequences == 0 or (
            together.num_sequences <= self.max_sequences and together.num_tokens <= self.max_tokens
        )

    def check(self, waiting: Load, new: Load) -> None:
        """Raise `QueueFullError` if the request `new` may not join what is `waiting`."""
        if self.have_room(waiting, new):
            return
        if waiting.num_sequences + new.num_sequences > self.max_sequences:
            raise _full(f"{self.max_sequences} requests", "max_num_queued_reqs")
        raise _full(f"{self.max_tokens} prompt tokens", "max_num_queued_tokens")


def _full(limit: str, setting: str) -> QueueFullError:
    return QueueFullError(f"Maximum queue size of {limit} reached ({setting}); try again later")
