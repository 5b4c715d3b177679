"""The draw on a CPU without our kernels: a row's distribution, inverted at one random number."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.sampling.draw import DrawParams
from engine.execution.sampling.step_arrays import DeviceArrays
from engine.execution.sampling.torch_filter import TorchFilter
from engine.execution.sampling.uniform import uniform_numbers


class TorchDraw:
    """A draw by torch's operations, in float64; greedy rows take part in none of them."""

    def __init__(self, params: DrawParams) -> None:
        """Plan it, the random numbers included."""
        drawn = np.flatnonzero(params.temperature > 0)
        self._drawn = torch.from_numpy(drawn)
        if not len(drawn):
            return
        top_k, top_p, min_p = params.top_k[drawn], params.top_p[drawn], params.min_p[drawn]
        filtered = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
        self._temperature = _column(params.temperature[drawn])
        self._uniform = _column(uniform_numbers(params.seeds[drawn], params.positions[drawn]))
        self._filtered = torch.from_numpy(filtered)
        self._filter = TorchFilter(*(_column(values[filtered]) for values in (top_k, top_p, min_p)))

    def draw(self, logits: Tensor, arrays: DeviceArrays) -> Tensor:
        """Do what `Draw.draw` says."""
        if 0 < len(self._drawn) == len(logits):
            return self._draw(logits)
        token_ids = logits.argmax(dim=-1)
        if len(self._drawn):
            token_ids[self._drawn] = self._draw(logits[self._drawn])
        return token_ids

    def _draw(self, logits: Tensor) -> Tensor:
        # No temperature is rounded to 0 in float64, and none overflows below a maximum of 0.
        logits = logits.double()
        colder = (logits - logits.amax(dim=-1, keepdim=True)) / self._temperature
        probs = torch.softmax(colder, dim=-1)
        if len(self._filtered):
            probs[self._filtered] = self._filter.apply(probs[self._filtered])
        return _invert(probs, self._uniform)


def _column(values: NDArray[np.float64] | NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(values)[:, None]


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index at which the running sum of `probs` exceeds `uniform` of the total.

    Where there is none, because logits are NaN or all forbidden, the last index: still a token.
    """
    mass = probs.cumsum(dim=-1)
    index = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)[:, 0]
    return index.clamp(max=probs.shape[-1] - 1)
