"""Logits processors, applied before the draw: masks, biases and penalties.

The host never reads the logits: "forbid these tokens, unless none would be left" is decided on the
device, without synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.request import Request
from engine.execution.sampling.step_arrays import DeviceArrays, Part, RequestArray, StepArrays
from kernels.sampling.adjust_logits import LogitBias, Penalties, adjust_logits
from kernels.sampling.token_counts import TokenCounts, count_output, mark_prompt


class Mask(Protocol):
    """Tokens that a step must not draw."""

    def apply(self, logits: Tensor, arrays: DeviceArrays) -> None:
        """Set the logits of forbidden tokens to -inf, in place; `logits` is float32 [R, V]."""


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
        # A known output size avoids a synchronisation with the device.
        rows = arrays[self._rows].repeat_interleave(
            arrays[self._lengths], output_size=self._num_tokens
        )
        return rows, torch.cat([tokens.on(logits.device) for tokens in self._lists])


class AllowedTokensMask(_TokenLists):
    """Forbids all but the listed tokens."""

    def apply(self, logits: Tensor, arrays: DeviceArrays) -> None:
        """Do what `Mask.apply` says."""
        index = self._index(logits, arrays)
        allowed = logits[index]
        logits.index_fill_(0, arrays[self._rows], -torch.inf)
        logits.index_put_(index, allowed)


class MinTokensMask(_TokenLists):
    """Forbids the listed stop tokens in rows that have not reached `min_tokens`."""

    def apply(self, logits: Tensor, arrays: DeviceArrays) -> None:
        """Do what `Mask.apply` says."""
        _forbid(logits, *self._index(logits, arrays))


class BadWords:
    """The `bad_words` of one request, as token sequences."""

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int) -> None:
        """Index `words` by the token before their last one."""
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


class BadWordsMask:
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
    """Forbid tokens, except in rows that would have no token left to draw."""
    index = (rows, token_ids)
    before = logits[index]
    forbidden = torch.full_like(before, -torch.inf)
    logits.index_put_(index, forbidden)
    left = logits.amax(dim=-1)[rows]
    logits.index_put_(index, torch.where(left == -torch.inf, before, forbidden))


class Bias:
    """The `logit_bias` of one request."""

    def __init__(self, logit_bias: Mapping[int, float]) -> None:
        """Store token ids and values for the device."""
        entries = sorted(logit_bias.items())
        self.token_ids = RequestArray(np.array([token for token, _ in entries], dtype=np.int32))
        with np.errstate(over="ignore"):  # infinity is right
            self.values = RequestArray(np.array([value for _, value in entries], dtype=np.float32))


@dataclass(frozen=True, slots=True)
class PenaltyParams:
    """The penalties of R rows; [R] each.

    Attributes:
        slots: row of the token counts; -1 without penalties.
        repetition, presence, frequency: as in `SamplingParams`.
    """

    slots: NDArray[np.int32]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]


class BiasAndPenalties:
    """The biases and penalties of the rows of a step."""

    def __init__(
        self, biases: Sequence[Bias | None], penalties: PenaltyParams, arrays: StepArrays
    ) -> None:
        """Plan them; `biases` has an entry for each of the rows."""
        lengths = [0 if bias is None else len(bias.values) for bias in biases]
        start_loc = np.zeros(len(biases) + 1, dtype=np.int32)
        np.cumsum(lengths, out=start_loc[1:])
        self._start_loc = arrays.add(start_loc)
        self._biases = [bias for bias in biases if bias is not None]
        self._penalties = [
            arrays.add(penalties.slots),
            arrays.add(penalties.repetition),
            arrays.add(penalties.presence),
            arrays.add(penalties.frequency),
        ]

    def apply(self, logits: Tensor, counts: TokenCounts, arrays: DeviceArrays) -> None:
        """Change `logits`, float32 [R, V], in place."""
        where = logits.device
        bias = LogitBias(
            start_loc=arrays[self._start_loc],
            token_ids=_joined([b.token_ids.on(where) for b in self._biases], torch.int32, where),
            values=_joined([b.values.on(where) for b in self._biases], torch.float32, where),
        )
        penalties = Penalties(*(arrays[part] for part in self._penalties))
        adjust_logits(logits, bias, penalties, counts)


def _joined(parts: list[Tensor], dtype: torch.dtype, where: torch.device) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device=where)


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens of a sequence when it takes a slot."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]

    @classmethod
    def of(cls, request: Request) -> TokenHistory:
        """Copy the tokens of `request`."""
        token_ids = np.array(request.token_ids, dtype=np.int32)
        return cls(token_ids[: request.num_prompt_tokens], token_ids[request.num_prompt_tokens :])


@dataclass(frozen=True, slots=True)
class PenaltyAdmissions:
    """Sequences with penalties that take slots before a step."""

    slots: Part  # int32 [P]
    start_loc: Part  # int32 [P + 1], where the prompts begin
    prompts: Part  # int32
    output_slots: Part  # int32, of each token of `outputs`
    outputs: Part  # int32

    @classmethod
    def gather(cls, histories: Mapping[int, TokenHistory], arrays: StepArrays) -> PenaltyAdmissions:
        """Plan to count the tokens in `histories`, by slot."""
        slots = np.array(list(histories), dtype=np.int32)
        known = list(histories.values())
        starts = accumulate((len(h.prompt) for h in known), initial=0)
        return cls(
            slots=arrays.add(slots),
            start_loc=arrays.add(np.array(list(starts), dtype=np.int32)),
            prompts=arrays.add(np.concatenate([h.prompt for h in known])),
            output_slots=arrays.add(np.repeat(slots, [len(h.output) for h in known])),
            outputs=arrays.add(np.concatenate([h.output for h in known])),
        )


class PenaltyCounts:
    """Counts of the tokens of the sequences in all slots, on the device.

    Only steps may use them, in the order in which they run.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Allocate nothing yet: the counts take 4 bytes per slot and token of the vocabulary."""
        self._num_slots = num_slots
        self.counts = TokenCounts.allocate(1, vocab_size, device)

    def admit(self, admissions: PenaltyAdmissions, arrays: DeviceArrays) -> None:
        """Reset the counts of the slots, and count the tokens of their sequences so far."""
        table = self.counts.output_counts
        if len(table) < self._num_slots:
            self.counts = TokenCounts.allocate(self._num_slots, table.shape[1], table.device)
        prompts = arrays[admissions.prompts]
        mark_prompt(self.counts, arrays[admissions.slots], arrays[admissions.start_loc], prompts)
        self.count(arrays[admissions.output_slots], arrays[admissions.outputs])

    def count(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count `token_ids` [N] for `slots`, int32 [N]; a slot of -1 is skipped."""
        count_output(self.counts, slots, token_ids)
