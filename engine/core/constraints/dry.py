"""DRY: penalises the tokens that would continue a repetition, the more the longer it is already.

The sampler is p-e-w's (text-generation-webui, pull request 5677), with the parameters of llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.logits_processors import ProcessorRow

_LARGEST = float(np.finfo(np.float32).max)
_BITS = 32  # of a length
_MAX_KEPT = 32  # lists of breakers, and prompts

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

        @lru_cache(_MAX_KEPT)
        def breakers(texts: tuple[str, ...]) -> Breakers:
            return Breakers(texts, text_of)

        self._breakers = breakers
        # The sequences of a request begin alike.
        self._of_prompt = lru_cache(_MAX_KEPT)(_of_prompt)

    def validate(self, args: object) -> None:
        """The fields have been checked with all others of the request."""

    def adjust(self, rows: Sequence[ProcessorRow]) -> list[Penalties | None]:
        """Return the penalised tokens of each row, and what is added to their logits."""
        return [self._adjust(row) for row in rows]

    def _adjust(self, row: ProcessorRow) -> Penalties | None:
        args: DryArgs = row.args
        if row.state is None:
            row.state = Repetitions(args.last_n, self._breakers(args.breakers), self._of_prompt)
        state: Repetitions = row.state
        # Beyond this exponent every penalty is the largest; with base 1 it makes no difference.
        grows = math.log(args.base)
        most = int(min(math.log(_LARGEST) / grows, args.last_n)) + 1 if grows else 0
        token_ids, lengths = state.continuations(
            row.token_ids, args.allowed_length, args.allowed_length + most
        )
        if not len(token_ids):
            return None
        exponents = (lengths - args.allowed_length).astype(np.float64)
        with np.errstate(over="ignore"):
            penalties = args.multiplier * np.power(args.base, exponents)
        return token_ids, -np.minimum(penalties, _LARGEST)


class Breakers:
    """Finds sequence breakers in tokens; sequences with the same ones share it."""

    def __init__(self, breakers: tuple[str, ...], text_of: Callable[[int], str]) -> None:
        self._breakers = breakers
        self._text_of = text_of
        self._pattern = re.compile("|".join(map(re.escape, breakers)) or "(?!)")
        # Characters before a token that may belong to a breaker that ends with it.
        self._reach = max(map(len, breakers), default=1) - 1
        self._contains = np.zeros(0, dtype=np.int8)  # by token; -1: not known

    def contained(self, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each token whether a breaker is in its text."""
        if (missing := int(token_ids.max(initial=-1)) + 1 - len(self._contains)) > 0:
            self._contains = np.pad(self._contains, (0, missing), constant_values=-1)
        for token_id in token_ids[self._contains[token_ids] < 0].tolist():
            self._contains[token_id] = self._pattern.search(self._text_of(token_id)) is not None
        return self._contains[token_ids] > 0

    def last(self, token_ids: NDArray[np.int32], start: int) -> int:
        """Return the position of the last token with which a breaker ends.

        Only from `start` on; -1 if there is none, or it is an earlier one.
        """
        texts = [self._text_of(token_id) for token_id in token_ids[start:].tolist()]
        before, position = "", start
        while len(before) < self._reach and position > 0:
            position -= 1
            before = self._text_of(int(token_ids[position])) + before
        text = before + "".join(texts)
        end = max((at + len(b) for b in self._breakers if (at := text.rfind(b)) >= 0), default=0)
        if end <= len(before):
            return -1
        return start + int(np.searchsorted([*accumulate(map(len, texts))], end - len(before)))


class Repetitions:
    """Earlier occurrences of the end of a sequence, updated token by token.

    A token costs a few operations on arrays of the length of the window. Texts are looked at only
    where a repetition is.
    """

    def __init__(
        self, last_n: int, breakers: Breakers, of_prompt: Callable[[bytes], NDArray[np.int32]]
    ) -> None:
        """Look at the last `last_n` tokens alone; `of_prompt`: `common_suffixes` of bytes."""
        self._last_n = last_n
        self._breakers = breakers
        self._of_prompt = of_prompt
        self._num_tokens = 0
        # How many of the last tokens are also those up to position p: at p + 1.
        self._lengths = np.zeros(1, dtype=np.int32)
        # The last token with which a breaker ends, of those from one position to before another.
        self._break, self._searched, self._searched_to = -1, 0, 0

    def continuations(
        self, token_ids: NDArray[np.int32], shortest: int, longest: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens that would continue a repetition of `shortest` tokens or more.

        Args:
            token_ids: of the sequence, which has grown since the last call.
            shortest: at least 0.
            longest: longer repetitions count as this.

        Returns:
            The tokens, each once and without a breaker in it, and the longest repetition that each
            would continue.
        """
        self._follow(token_ids)
        num_tokens, start = len(token_ids), self._start(len(token_ids))
        lengths = self._lengths[start + 1 : num_tokens]
        positions = np.flatnonzero(lengths >= shortest)
        in_window = np.minimum(positions + 1, longest)
        lengths = np.minimum(lengths[positions], in_window)
        limit = self._since_break(token_ids, int(lengths.max(initial=0)))
        lengths = np.minimum(lengths, limit)
        positions, lengths = positions[lengths >= shortest], lengths[lengths >= shortest]
        # The last of each token, when sorted by token and length.
        pairs = token_ids[start + 1 + positions].astype(np.int64) << _BITS | lengths
        pairs.sort()
        found = pairs >> _BITS
        is_last = np.append(found[1:] != found[:-1], True)[: len(found)]
        found, longest_of = found[is_last], pairs[is_last] & (1 << _BITS) - 1
        kept = ~self._breakers.contained(found)
        return found[kept], longest_of[kept]

    def _start(self, num_tokens: int) -> int:
        """Return where the window of so many tokens begins."""
        return max(0, num_tokens - self._last_n)

    def _since_break(self, token_ids: NDArray[np.int32], most: int) -> int:
        """Return the number of tokens after the last break, if it is less than `most`."""
        num_tokens = len(token_ids)
        first = num_tokens - most
        if first > self._searched_to:
            self._searched = self._searched_to = first
        last = self._breakers.last
        self._break = max(self._break, last(token_ids, self._searched_to))
        if first < self._searched:
            if self._break < self._searched:
                self._break = max(self._break, last(token_ids[: self._searched], first))
            self._searched = first
        self._searched_to = num_tokens
        return num_tokens - 1 - self._break

    def _follow(self, token_ids: NDArray[np.int32]) -> None:
        """Take in the new tokens."""
        if len(token_ids) >= len(self._lengths):
            longer = np.zeros(2 * len(token_ids), dtype=np.int32)
            longer[: len(self._lengths)] = self._lengths
            self._lengths = longer
        if not self._num_tokens:
            start, self._num_tokens = self._start(len(token_ids)), len(token_ids)
            self._lengths[start + 1 : len(token_ids) + 1] = self._of_prompt(
                token_ids[start:].tobytes()
            )
        for count in range(self._num_tokens + 1, len(token_ids) + 1):
            self._append(token_ids[:count])
        self._num_tokens = len(token_ids)

    def _append(self, token_ids: NDArray[np.int32]) -> None:
        start, last = self._start(len(token_ids)), len(token_ids) - 1
        is_same = token_ids[start:last] == token_ids[last]
        self._lengths[start + 1 : last + 1] = (self._lengths[start:last] + 1) * is_same


def _of_prompt(prompt: bytes) -> NDArray[np.int32]:
    return common_suffixes(np.frombuffer(prompt, dtype=np.int32))


def common_suffixes(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return how many of the last tokens are also those up to each position: int32 [T].

    By the Z algorithm from the end, in linear time, and only where the last token is.
    """
    lengths = np.zeros(len(token_ids), dtype=np.int32)
    backwards = token_ids[::-1].tolist()
    size = len(backwards)
    same = [0] * size
    left = right = 0  # the part that is known to be equal to the end, of which it is the farthest
    for position in (np.flatnonzero(token_ids[::-1][1:] == token_ids[-1]) + 1).tolist():
        length = min(right - position, same[position - left]) if position < right else 0
        if position + length >= right:
            while position + length < size and backwards[length] == backwards[position + length]:
                length += 1
            left, right = position, position + length
        same[position] = length
        lengths[size - 1 - position] = length
    return lengths
