"""What must not come next: all but the allowed tokens, ends of bad words, ends that are too early.

The host does not see the logits. So "forbid these, unless that leaves nothing" is decided on the
device, where nothing waits for the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.sampling.step_arrays import DeviceArrays, RequestArray, StepArrays


class Mask(Protocol):
    """Something that has been planned to be forbidden."""

    def apply(self, logits: Tensor, arrays: DeviceArrays) -> None:
        """Set what is forbidden to -inf, in place, in `logits`, float32 [R, V]."""


class _TokenLists:
    """A list of tokens for each of some rows."""

    def __init__(
        self, rows: NDArray[np.int64], lists: Sequence[RequestArray], arrays: StepArrays
    ) -> None:
        """Plan the use of `lists[i]`, int64, for `rows[i]`."""
        lengths = np.array([len(tokens) for tokens in lists], dtype=np.int64)
        self._rows, self._lengths = arrays.add(rows), arrays.add(lengths)
        self._num_tokens = int(lengths.sum())
        self._lists = lists

    def _index(self, logits: Tensor, arrays: DeviceArrays) -> tuple[Tensor, Tensor]:
        """Return the rows and the columns of the tokens in `logits`."""
        # With its size known, the device need not be asked.
        rows = arrays[self._rows].repeat_interleave(
            arrays[self._lengths], output_size=self._num_tokens
        )
        return rows, torch.cat([tokens.on(logits.device) for tokens in self._lists])


class AllowedTokens(_TokenLists):
    """Forbids all but the listed tokens."""

    def apply(self, logits: Tensor, arrays: DeviceArrays) -> None:
        """Do what `Mask.apply` says."""
        index = self._index(logits, arrays)
        allowed = logits[index]
        logits.index_fill_(0, arrays[self._rows], -torch.inf)
        logits.index_put_(index, allowed)


class StopTokens(_TokenLists):
    """Forbids the listed tokens, which would end a sequence that must not end yet."""

    def apply(self, logits: Tensor, arrays: DeviceArrays) -> None:
        """Do what `Mask.apply` says."""
        _forbid(logits, *self._index(logits, arrays))


class BadWords:
    """The token sequences that one request must not produce."""

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int) -> None:
        """Sort `words` by what has to be seen before their last token is forbidden."""
        self._always: list[int] = []
        self._after: dict[int, list[tuple[list[int], int]]] = {}
        for *head, last in words:
            if last >= vocab_size:
                continue
            if head:
                self._after.setdefault(head[-1], []).append((head, last))
            else:
                self._always.append(last)

    def ends(self, token_ids: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Return the last token of each word whose other tokens have just been produced."""
        return self._always + [
            last
            for head, last in self._after.get(token_ids[-1], ())
            if token_ids[max(num_prompt_tokens, len(token_ids) - len(head)) :] == head
        ]


class BadWordEnds:
    """Forbids in each row the tokens that would complete a bad word."""

    def __init__(self, ends: Mapping[int, Sequence[int]], arrays: StepArrays) -> None:
        """Plan that `ends[row]` is forbidden."""
        rows = [row for row, found in ends.items() for _ in found]
        self._rows = arrays.add(np.array(rows, dtype=np.int64))
        token_ids = [token_id for found in ends.values() for token_id in found]
        self._ends = arrays.add(np.array(token_ids, dtype=np.int64))

    def apply(self, logits: Tensor, arrays: DeviceArrays) -> None:
        """Do what `Mask.apply` says."""
        _forbid(logits, arrays[self._rows], arrays[self._ends])


def _forbid(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Forbid tokens, unless that leaves none in a row: some token has to come."""
    index = (rows, token_ids)
    before = logits[index]
    forbidden = torch.full_like(before, -torch.inf)
    logits.index_put_(index, forbidden)
    left = logits.amax(dim=-1)[rows]
    logits.index_put_(index, torch.where(left == -torch.inf, before, forbidden))
