"""DRY: penalises the tokens that would continue a repetition, the more the longer it is already.

The sampler is p-e-w's (text-generation-webui, pull request 5677), with the parameters of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.logits_processors import ProcessorRow

_LARGEST = float(np.finfo(np.float32).max)
_MAX_LOG = math.log(_LARGEST)
_GROWS = 1.000001  # a smaller base never overflows
_BITS = 32  # of a length

Penalties = tuple[NDArray[np.int64], NDArray[np.float64]]


class DryArgs(NamedTuple):
    """The fields `dry_*` of a request; `last_n` is at least 1."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: tuple[str, ...]


class Dry:
    """The logits processor for the fields `dry_*`.

    If the last n tokens of a sequence have been in it before, the token that came next there gets
    multiplier * base ** (n - allowed_length) less, from n = allowed_length on. Such a repetition
    does not reach across a token with which a sequence breaker ends, and a token that has a breaker
    in it is not penalised.
    """

    def __init__(self, text_of: Callable[[int], str]) -> None:
        """`text_of` returns the text of a token alone."""
        self._text_of = text_of

    def validate(self, args: object) -> None:
        """The fields have been checked with all others of the request."""

    def adjust(self, rows: Sequence[ProcessorRow]) -> list[Penalties | None]:
        """Return the penalised tokens of each row, and what is added to their logits."""
        return [self._adjust(row) for row in rows]

    def _adjust(self, row: ProcessorRow) -> Penalties | None:
        args: DryArgs = row.args
        if row.state is None:
            row.state = Repetitions(args.last_n, Breakers(args.breakers, self._text_of))
        state: Repetitions = row.state
        token_ids, lengths = state.continuations(row.token_ids, args.allowed_length)
        if not len(token_ids):
            return None
        exponents = lengths - args.allowed_length
        if args.base > _GROWS and (most := int(_MAX_LOG / math.log(args.base))):
            exponents = np.minimum(exponents, most)
        with np.errstate(over="ignore"):
            penalties = args.multiplier * np.power(args.base, exponents.astype(np.float64))
        return token_ids, -np.minimum(penalties, _LARGEST)


class Breakers:
    """Finds the tokens of a growing sequence with which a breaker ends.

    Attributes:
        reach: characters before a token that may belong to a breaker that ends with it.
    """

    def __init__(self, breakers: tuple[str, ...], text_of: Callable[[int], str]) -> None:
        self._breakers = breakers
        self._text_of = text_of
        self.reach = max(map(len, breakers), default=1) - 1
        self._tail = ""
        self._found: dict[int, bool] = {}  # by token

    def contains(self, token_id: int) -> bool:
        """Whether a breaker is in the text of the token."""
        if token_id not in self._found:
            text = self._text_of(token_id)
            self._found[token_id] = any(breaker in text for breaker in self._breakers)
        return self._found[token_id]

    def last(self, token_ids: NDArray[np.int32]) -> int:
        """Return the place of the last token with which a breaker ends, -1 if there is none."""
        texts = [self._text_of(token_id) for token_id in token_ids.tolist()]
        text = "".join(texts)
        self._tail = text[max(0, len(text) - self.reach) :]
        found = [place + len(b) for b in self._breakers if (place := text.rfind(b)) >= 0]
        if not found:
            return -1
        return int(np.searchsorted([*accumulate(map(len, texts))], max(found)))

    def ends_with(self, token_id: int) -> bool:
        """Whether a breaker ends with the next token."""
        before = len(self._tail)
        text = self._tail + self._text_of(token_id)
        self._tail = text[max(0, len(text) - self.reach) :]
        return any(text.find(b, max(0, before - len(b) + 1)) >= 0 for b in self._breakers)


class Repetitions:
    """Where the end of a sequence has been in it before, followed token by token.

    A token costs a few operations on arrays of the length of the window.
    """

    def __init__(self, last_n: int, breakers: Breakers) -> None:
        """Look at the last `last_n` tokens alone."""
        self._last_n = last_n
        self._breakers = breakers
        self._num_tokens = 0
        # How many of the last tokens are also those up to place p: at p + 1.
        self._lengths = np.zeros(1, dtype=np.int32)
        self._break = -1  # place of the last token with which a breaker ends

    def continuations(
        self, token_ids: NDArray[np.int32], shortest: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens that would continue a repetition of `shortest` tokens or more.

        Args:
            token_ids: of the sequence, which has grown since the last call.
            shortest: at least 0.

        Returns:
            The tokens, each once and without a breaker in it, and the longest repetition that each
            would continue.
        """
        self._follow(token_ids)
        num_tokens, start = len(token_ids), self._start(len(token_ids))
        limit = min(num_tokens - start, num_tokens - 1 - self._break)
        if num_tokens - start <= shortest or limit < shortest:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        lengths = self._lengths[start + 1 : num_tokens]
        places = np.flatnonzero(lengths >= shortest)
        lengths = np.minimum(lengths[places], np.minimum(places + 1, limit))  # within the window
        places, lengths = places[lengths >= shortest], lengths[lengths >= shortest]
        # The last of each token, when sorted by token and length.
        pairs = token_ids[start + 1 + places].astype(np.int64) << _BITS | lengths
        pairs.sort()
        found = pairs >> _BITS
        is_last = np.append(found[1:] != found[:-1], True)[: len(found)]
        found, longest = found[is_last], pairs[is_last] & (1 << _BITS) - 1
        kept = [i for i, token in enumerate(found.tolist()) if not self._breakers.contains(token)]
        return found[kept], longest[kept]

    def _start(self, num_tokens: int) -> int:
        """Return where the window of so many tokens begins."""
        return max(0, num_tokens - self._last_n)

    def _follow(self, token_ids: NDArray[np.int32]) -> None:
        """Take in the new tokens."""
        if len(token_ids) >= len(self._lengths):
            longer = np.zeros(2 * len(token_ids), dtype=np.int32)
            longer[: len(self._lengths)] = self._lengths
            self._lengths = longer
        if not self._num_tokens:
            self._begin(token_ids)
        for count in range(self._num_tokens + 1, len(token_ids) + 1):
            self._append(token_ids[:count])
        self._num_tokens = len(token_ids)

    def _begin(self, token_ids: NDArray[np.int32]) -> None:
        start = self._start(len(token_ids))
        self._lengths[start + 1 : len(token_ids) + 1] = common_suffixes(token_ids[start:])
        start = max(0, start - self._breakers.reach)
        if (last := self._breakers.last(token_ids[start:])) >= 0:
            self._break = start + last
        self._num_tokens = len(token_ids)

    def _append(self, token_ids: NDArray[np.int32]) -> None:
        start, last = self._start(len(token_ids)), len(token_ids) - 1
        is_same = token_ids[start:last] == token_ids[last]
        self._lengths[start + 1 : last + 1] = (self._lengths[start:last] + 1) * is_same
        if self._breakers.ends_with(int(token_ids[last])):
            self._break = last


def common_suffixes(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return how many of the last tokens are also those up to each place: int32 [T].

    By the Z algorithm from the end, in linear time, and only where the last token is.
    """
    lengths = np.zeros(len(token_ids), dtype=np.int32)
    backwards = token_ids[::-1].tolist()
    size = len(backwards)
    same = [0] * size
    left = right = 0  # the part that is known to be equal to the end, of which it is the farthest
    for place in (np.flatnonzero(token_ids[::-1][1:] == token_ids[-1]) + 1).tolist():
        length = min(right - place, same[place - left]) if place < right else 0
        if place + length >= right:
            while place + length < size and backwards[length] == backwards[place + length]:
                length += 1
            left, right = place, place + length
        same[place] = length
        lengths[size - 1 - place] = length
    return lengths
