"""The draw of a token per row: temperature, top-k, top-p, min-p and the random number.

On a GPU by kernels in the Triton language; on a CPU by a C++ kernel, or by torch's operations if it
has not been built. Both CPU forms draw the same tokens from the same random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.sampling.step_arrays import Array, DeviceArrays, Part, StepArrays
from kernels.cpu.draw import draw_tokens
from kernels.sampling.draw import sample_tokens

# Bounds of the temperature: beyond them, float32 would give 0 and infinity.
_COLDEST, _HOTTEST = 1e-37, 1e37
_FEW = 512  # most likely tokens that are filtered before a whole row is sorted

# Philox-4x64-10.
_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_ROUNDS = 10
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How the tokens of R rows are drawn; [R] each.

    Attributes:
        temperature, top_k, top_p, min_p: as in `SamplingParams`; 0, 0, 1 and 0 are neutral.
        seeds, positions: a row's seed and its number of output tokens determine its random number.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]

    @property
    def has_filters(self) -> bool:
        """Whether a filter may drop a token of a row that is not greedy."""
        filtered = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        return bool((filtered & (self.temperature > 0)).any())

    def kernel_columns(self) -> tuple[Array, ...]:
        """Return the arguments of `sample_tokens` after the logits, of its dtypes."""
        temperature = self.temperature.clip(_COLDEST, _HOTTEST) * (self.temperature > 0)
        return (
            temperature.astype(np.float32),
            self.top_k,
            self.top_p.astype(np.float32),
            self.min_p.astype(np.float32),
            self.seeds.view(np.int64),
            self.positions,
        )


class Draw(Protocol):
    """A draw that has been planned."""

    def draw(self, logits: Tensor, arrays: DeviceArrays) -> Tensor:
        """Return a token per row, int64 [R]; `logits`, float32 [R, V], are not changed."""


class KernelDraw:
    """A draw by our kernels in the Triton language."""

    def __init__(self, params: DrawParams, arrays: StepArrays) -> None:
        """Plan it; the parameters are uploaded with `arrays`."""
        self._has_filters = params.has_filters
        self._parts: tuple[Part, ...] = tuple(map(arrays.add, params.kernel_columns()))

    def draw(self, logits: Tensor, arrays: DeviceArrays) -> Tensor:
        """Do what `Draw.draw` says."""
        columns = (arrays[part] for part in self._parts)
        return sample_tokens(logits, *columns, has_filters=self._has_filters)


class CpuDraw:
    """A draw by our kernel in C++; the same tokens as `TorchDraw`, from the same random numbers."""

    def __init__(self, params: DrawParams) -> None:
        """Plan it, with the random numbers."""
        uniform = np.zeros_like(params.temperature)
        if params.temperature.any():
            uniform = uniform_numbers(params.seeds, params.positions)
        columns = (params.temperature, params.top_k, params.top_p, params.min_p, uniform)
        self._columns = [torch.from_numpy(column) for column in columns]

    def draw(self, logits: Tensor, arrays: DeviceArrays) -> Tensor:
        """Do what `Draw.draw` says."""
        return draw_tokens(logits, *self._columns)


class TorchDraw:
    """A draw by torch's operations, in float64; greedy rows take the argmax alone."""

    def __init__(self, params: DrawParams) -> None:
        """Plan it, with the random numbers."""
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

    If there is none, because logits are NaN or all masked, the last index: a valid token id.
    """
    mass = probs.cumsum(dim=-1)
    index = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)[:, 0]
    return index.clamp(max=probs.shape[-1] - 1)


class TorchFilter(NamedTuple):
    """The filters of R rows, [R, 1] each, as in `SamplingParams`.

    They apply in turn to the tokens sorted by descending probability, then ascending index: top_k
    keeps the first; min_p those with at least min_p of the largest probability; top_p each token
    before which the remaining ones sum to less than top_p of their total.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def apply(self, probs: Tensor) -> Tensor:
        """Return `probs`, float64 [R, V], with 0 for all tokens filtered out."""
        total = probs.sum(dim=-1, keepdim=True)
        ranked, token_ids = _largest(probs, min(_FEW, probs.shape[-1]))
        kept, done = self._keep(ranked, total)
        out = _back(probs, ranked, token_ids, kept)
        rest = (~done).nonzero()[:, 0]
        if len(rest):
            probs = probs[rest]
            ranked, token_ids = probs.sort(dim=-1, descending=True, stable=True)
            whole = TorchFilter(*(column[rest] for column in self))
            kept, _ = whole._keep(ranked, total[rest])
            out[rest] = _back(probs, ranked, token_ids, kept)
        return out

    def _keep(self, ranked: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the first tokens are kept, [R, N], and for which rows that is all, [R].

        `total` is the probability of all tokens, [R, 1].
        """
        rank = torch.arange(ranked.shape[-1])
        left = (rank < self.top_k) | (self.top_k == 0)
        left &= ranked >= self.min_p * ranked[:, :1]
        masses = ranked.masked_fill(~left, 0.0)
        goes_on = left[:, -1:]
        mass = torch.where(goes_on, total, masses.sum(dim=-1, keepdim=True))
        before = masses.cumsum(dim=-1) - masses
        kept = left & ((before < self.top_p * mass) | (self.top_p >= 1))
        # Tokens after the first N may be as likely as the last of these.
        ends = ~(kept & (ranked == ranked[:, -1:])).any(dim=-1, keepdim=True)
        knows_mass = ~goes_on | ((self.top_k == 0) & (self.min_p == 0))
        return kept, (ends & knows_mass)[:, 0]


def _largest(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first tokens by probability, equal ones by index: values and indices [R, count].

    Which of the tokens tied with the last are included is not defined.
    """
    token_ids = probs.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, order = probs.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return ranked, token_ids.gather(-1, order)


def _back(probs: Tensor, ranked: Tensor, token_ids: Tensor, kept: Tensor) -> Tensor:
    """Return the kept probabilities in the order of the vocabulary."""
    return torch.zeros_like(probs).scatter_(-1, token_ids, ranked.masked_fill(~kept, 0.0))


def uniform_numbers(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each seed and position, [R] each.

    They equal `np.random.Generator(np.random.Philox(key=seed, counter=position)).random()`, whose
    construction takes far longer than the draw: the first word of Philox-4x64-10 (Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", 2011). A preempted sequence, or one in another
    slot, continues with the same numbers.
    """
    # Words 0 and 2 of the counter in one array, 1 and 3 in the other. NumPy increments the counter
    # before it draws.
    even = np.zeros((2, len(seeds)), dtype=np.uint64)
    even[0] = positions + 1
    odd = np.zeros_like(even)
    key = np.zeros_like(even)
    key[0] = seeds
    for _ in range(_ROUNDS):
        high, low = _multiply(_MULTIPLIERS, even)
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key += _WEYL
    numbers: NDArray[np.float64] = (even[0] >> np.uint64(11)) * 2.0**-53
    return numbers


def _multiply(
    a: NDArray[np.uint64], b: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the high and the low 64 bits of the products, from those of 32-bit halves."""
    a_high, a_low, b_high, b_low = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    middle = a_high * b_low + ((a_low * b_low) >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    return a_high * b_high + (middle >> _HALF) + (other >> _HALF), a * b
