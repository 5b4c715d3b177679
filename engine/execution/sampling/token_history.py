"""What the sequences in the slots have said, counted on the device for their penalties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.request import Request
from engine.execution.sampling.step_arrays import DeviceArrays, Part, StepArrays
from kernels.sampling.token_counts import TokenCounts, count_output, mark_prompt


@dataclass(frozen=True, slots=True)
class History:
    """What a sequence has said when it takes a slot."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]

    @classmethod
    def of(cls, request: Request) -> History:
        """Copy the tokens of `request`."""
        token_ids = np.array(request.token_ids, dtype=np.int32)
        return cls(token_ids[: request.num_prompt_tokens], token_ids[request.num_prompt_tokens :])


@dataclass(frozen=True, slots=True)
class Admissions:
    """Sequences that take slots before a step."""

    slots: Part  # int32 [P]
    start_loc: Part  # int32 [P + 1], where the prompts begin
    prompts: Part  # int32
    output_slots: Part  # int32, of each token of `outputs`
    outputs: Part  # int32

    @classmethod
    def gather(cls, histories: Mapping[int, History], arrays: StepArrays) -> Admissions:
        """Plan that each slot is given to the sequence with that history."""
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


class TokenHistory:
    """The counts of all slots; only steps in their order may use it."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Leave the counts, 4 bytes for each slot and token, until a sequence needs them."""
        self._num_slots = num_slots
        self.counts = TokenCounts.allocate(1, vocab_size, device)

    def admit(self, admissions: Admissions, arrays: DeviceArrays) -> None:
        """Forget what the slots held, and count what their sequences have said so far."""
        table = self.counts.output_counts
        if len(table) < self._num_slots:
            self.counts = TokenCounts.allocate(self._num_slots, table.shape[1], table.device)
        prompts = arrays[admissions.prompts]
        mark_prompt(self.counts, arrays[admissions.slots], arrays[admissions.start_loc], prompts)
        self.count(arrays[admissions.output_slots], arrays[admissions.outputs])

    def count(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count a token, [N], for each of `slots`, int32 [N], but -1."""
        count_output(self.counts, slots, token_ids)
