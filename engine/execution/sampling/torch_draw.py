"""The draw on a CPU: the cumulative distribution of a row, inverted at one random number."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.sampling.draw import DrawParams
from engine.execution.sampling.step_arrays import DeviceArrays
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
        self._top_k = _column(top_k[filtered])
        self._top_p = _column(top_p[filtered])
        self._min_p = _column(min_p[filtered])

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
            probs[self._filtered] = self._filter(probs[self._filtered])
        return _invert(probs, self._uniform)

    def _filter(self, probs: Tensor) -> Tensor:
        """Return `probs` with 0 for all that top-k, then min-p, then top-p leave out."""
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        vocab = probs.shape[-1]
        top_k = torch.where(self._top_k > 0, self._top_k, vocab)
        outside = (torch.arange(vocab) >= top_k) | (probs < self._min_p * probs[:, :1])
        probs = probs.masked_fill(outside, 0.0)
        # Nucleus: a token stays while the mass before it has not reached top_p of what is left.
        mass_before = probs.cumsum(dim=-1) - probs
        outside = mass_before >= self._top_p * probs.sum(dim=-1, keepdim=True)
        kept = probs.masked_fill(outside & (self._top_p < 1), 0.0)
        # Back in the order of the vocabulary, so that a row draws the same as an unfiltered one.
        return torch.zeros_like(kept).scatter_(1, order, kept)


def _column(values: NDArray[np.float64] | NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(values)[:, None]


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index at which the running sum of `probs` exceeds `uniform` of the total.

    Where there is none, because logits are NaN or all forbidden, the last index: still a token.
    """
    mass = probs.cumsum(dim=-1)
    index = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)[:, 0]
    return index.clamp(max=probs.shape[-1] - 1)
