"""Biases and penalties of the rows that ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.sampling.step_arrays import DeviceArrays, RequestArray, StepArrays
from kernels.sampling.adjust_logits import LogitBias, Penalties, adjust_logits
from kernels.sampling.token_counts import TokenCounts


class Bias:
    """What a request wants added to single logits."""

    def __init__(self, logit_bias: Mapping[int, float]) -> None:
        """Take over a value for each token."""
        entries = sorted(logit_bias.items())
        self.token_ids = RequestArray(np.array([token for token, _ in entries], dtype=np.int32))
        with np.errstate(over="ignore"):  # infinity is right
            self.values = RequestArray(np.array([value for _, value in entries], dtype=np.float32))


@dataclass(frozen=True, slots=True)
class PenaltyParams:
    """How R rows are penalised for what came before; [R] each.

    Attributes:
        slots: where that is counted; -1 if nothing is penalised.
        repetition, presence, frequency: as in `SamplingParams`.
    """

    slots: NDArray[np.int32]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]


class Adjustment:
    """The biases and penalties of the rows of a step."""

    def __init__(
        self, biases: Sequence[Bias | None], penalties: PenaltyParams, arrays: StepArrays
    ) -> None:
        """Plan that each row gets its bias and its penalties."""
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
