"""Chooses among servers: the one that has the prefix cached, unless it is overloaded."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from client.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server that takes requests.

    Attributes:
        load: requests that it has and has not finished.
        match: blocks of the prompt that it has probably cached.
        cached: blocks of any prompt that it has probably cached.
    """

    load: int
    match: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Balance:
    """When a cached prefix decides; names and values are those of SGLang's router.

    Attributes:
        cache_threshold: it must be at least this share of the prompt, 0 to 1.
        balance_abs_threshold: a server is overloaded with more than this many requests above the
            least loaded one, and
        balance_rel_threshold: more than so many times as many, at least 1.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5

    def __post_init__(self) -> None:
        if not 0 <= self.cache_threshold <= 1:
            raise ConfigurationError("must be between 0 and 1", param="cache_threshold")
        if self.balance_abs_threshold < 0:
            raise ConfigurationError("must not be negative", param="balance_abs_threshold")
        if not self.balance_rel_threshold >= 1:
            raise ConfigurationError("must be at least 1", param="balance_rel_threshold")

    def overloaded(self, load: int, least: int) -> bool:
        """Return whether a server with `load` requests gets none for its cache's sake."""
        return (
            load - least > self.balance_abs_threshold and load > least * self.balance_rel_threshold
        )

    def choose(
        self, candidates: Sequence[Candidate], num_blocks: int, chance: random.Random
    ) -> int:
        """Return the index of the server that a prompt of `num_blocks` blocks goes to.

        Without a prefix that decides, it is the less loaded of two taken at random: the power of
        two choices, which does not send everyone to the server that was idle a moment ago. Of two
        with as much to do, it is the one whose cache has more room.
        """
        least = min(each.load for each in candidates)
        best = max(range(len(candidates)), key=lambda i: (candidates[i].match, -candidates[i].load))
        match = candidates[best].match
        if (
            match
            and match >= self.cache_threshold * num_blocks
            and not self.overloaded(candidates[best].load, least)
        ):
            return best
        two = chance.sample(range(len(candidates)), min(2, len(candidates)))
        return min(two, key=lambda i: (candidates[i].load, candidates[i].cached))
