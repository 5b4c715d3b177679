"""QueueLimits: limits of the waiting queue, beyond which requests are refused."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.engine_config import EngineConfig
from engine.errors import QueueFullError

# About 150 MB as Python integers, in the engine process and again on the way to it.
_MAX_DEFAULT_TOKENS = 2**22


@dataclass(frozen=True, slots=True)
class Load:
    """The size of some requests: their sequences, and the tokens of their prompts."""

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

    Sequences that fit into free slots, and so run in one of the next steps, do not count.
    """

    max_sequences: int
    max_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, *, kv_cache_tokens: int, max_num_seqs: int) -> QueueLimits:
        """Return the limits of `config` for a KV cache and a number of slots.

        The default number of tokens is that of `max_num_queued_reqs` prompts of the mean length
        that the cache holds: only longer prompts reach it before the limit of sequences.
        """
        sequences, tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
        if tokens is None:
            tokens = max(1, kv_cache_tokens * sequences // max_num_seqs)
            tokens = min(tokens, _MAX_DEFAULT_TOKENS)
        return cls(sequences, tokens)

    def have_room(self, waiting: Load, new: Load) -> bool:
        """Whether the request `new` may be queued behind `waiting`.

        Always if nothing waits, even for a request that exceeds a limit by itself.
        """
        together = waiting + new
        return waiting.num_sequences == 0 or (
            together.num_sequences <= self.max_sequences and together.num_tokens <= self.max_tokens
        )

    def share(self, load: Load) -> float:
        """Return which part of the queue `load` takes."""
        return max(load.num_sequences / self.max_sequences, load.num_tokens / self.max_tokens)

    def check(self, waiting: Load, new: Load) -> None:
        """Raise `QueueFullError` if the request `new` may not be queued behind `waiting`."""
        if self.have_room(waiting, new):
            return
        if waiting.num_sequences + new.num_sequences > self.max_sequences:
            raise _full(f"{self.max_sequences} requests", "max_num_queued_reqs")
        raise _full(f"{self.max_tokens} prompt tokens", "max_num_queued_tokens")

    def displaced(self) -> QueueFullError:
        """Return the error for a request that another one has displaced from the full queue."""
        return QueueFullError(
            f"Maximum queue size of {self.max_sequences} requests or {self.max_tokens} prompt "
            "tokens reached, and a request that goes before this one took its place; try again "
            "later"
        )


def _full(limit: str, setting: str) -> QueueFullError:
    return QueueFullError(f"Maximum queue size of {limit} reached ({setting}); try again later")
