"""Logits processors, applied before the draw: masks, biases and penalties.

The host never reads the logits: "forbid these tokens, unless none would be left" is decided on the
device, without synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.schedule import SamplingBatch
from engine.execution.sampling.step_arrays import DeviceArrays, Part, RequestArray, StepArrays
from kernels.sampling.adjust_logits import LogitBias, Penalties, adjust_logits
from kernels.sampling.token_counts import TokenCounts, count_output, mark_prompt


class Mask(Protocol):
    """Tokens that a step must not draw."""

    def apply(self, logits: Tensor, arrays: DeviceArrays) -> None:
        """Set the logits of forbidden tokens to -inf, in place; `logits` is float32 [R, V]."""


class AllowedTokensMask:
    """Forbids all but a list of tokens for each of some rows."""

    def __init__(
        self, rows: NDArray[np.int64], lists: Sequence[RequestArray], arrays: StepArrays
    ) -> None:
        """Plan that `rows[i]` may only get a token of `lists[i]`, int64."""
        lengths = np.array([len(tokens) for tokens in lists], dtype=np.int64)
        self._rows, self._lengths = arrays.add(rows), arrays.add(lengths)
        self._num_tokens = int(lengths.sum())
        self._lists = lists

    def apply(self, logits: Tensor, arrays: DeviceArrays) -> None:
        """Do what `Mask.apply` says."""
        # A known output size avoids a synchronisation with the device.
        rows = arrays[self._rows].repeat_interleave(
            arrays[self._lengths], output_size=self._num_tokens
        )
        index = rows, torch.cat([tokens.on(logits.device) for tokens in self._lists])
        allowed = logits[index]
        logits.index_fill_(0, arrays[self._rows], -torch.inf)
        logits.index_put_(index, allowed)


class ForbiddenTokensMask:
    """Forbids single tokens of rows, except in rows that would have no token left to draw."""

    def __init__(self, sampling: SamplingBatch, arrays: StepArrays) -> None:
        """Plan that the pairs of `sampling` are forbidden."""
        self._rows = arrays.add(sampling.forbidden_rows.astype(np.int64))
        self._token_ids = arrays.add(sampling.forbidden_token_ids.astype(np.int64))

    def apply(self, logits: Tensor, arrays: DeviceArrays) -> None:
        """Do what `Mask.apply` says."""
        rows = arrays[self._rows]
        index = rows, arrays[self._token_ids]
        before = logits[index]
        forbidden = torch.full_like(before, -torch.inf)
        logits.index_put_(index, forbidden)
        left = logits.amax(dim=-1)[rows]
        logits.index_put_(index, torch.where(left == -torch.inf, before, forbidden))


class Bias(NamedTuple):
    """The `logit_bias` of one request."""

    token_ids: RequestArray
    values: RequestArray


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

    def free(self) -> None:
        """Free the counts of all slots; the next admission allocates them again."""
        table = self.counts.output_counts
        self.counts = TokenCounts.allocate(1, table.shape[1], table.device)

    def count(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count `token_ids` [N] for `slots`, int32 [N]; a slot of -1 is skipped."""
        count_output(self.counts, slots, token_ids)
