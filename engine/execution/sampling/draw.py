"""The draw of a token per row, on the device that the logits are on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.sampling.step_arrays import DeviceArrays, Part, StepArrays
from kernels.sampling.draw import sample_tokens

# Beyond these, float32 has 0 and infinity.
_COLDEST, _HOTTEST = 1e-37, 1e37


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How the tokens of R rows are drawn; [R] each.

    Attributes:
        temperature, top_k, top_p, min_p: as in `SamplingParams`; 0, 0, 1 and 0 ask for nothing.
        seeds, positions: a row's seed and its number of output tokens decide its random numbers.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]


class Draw(Protocol):
    """A draw that has been planned."""

    def draw(self, logits: Tensor, arrays: DeviceArrays) -> Tensor:
        """Return a token per row of `logits`, float32 [R, V], which stay as they are: int64 [R]."""


class KernelDraw:
    """A draw by our kernels."""

    def __init__(self, params: DrawParams, arrays: StepArrays) -> None:
        """Plan it; the parameters travel in `arrays`."""
        temperature = params.temperature.clip(_COLDEST, _HOTTEST) * (params.temperature > 0)
        self._parts: tuple[Part, ...] = (
            arrays.add(temperature.astype(np.float32)),
            arrays.add(params.top_k),
            arrays.add(params.top_p.astype(np.float32)),
            arrays.add(params.min_p.astype(np.float32)),
            arrays.add(params.seeds.view(np.int64)),
            arrays.add(params.positions),
        )

    def draw(self, logits: Tensor, arrays: DeviceArrays) -> Tensor:
        """Do what `Draw.draw` says."""
        return sample_tokens(logits, *(arrays[part] for part in self._parts))
