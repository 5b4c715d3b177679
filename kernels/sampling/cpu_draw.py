"""The draw of a token per row on a CPU, with the random numbers of NumPy's Philox generator.

By a C++ kernel, or by torch's operations if it has not been built: both draw the same tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import cpu
from kernels.cpu.draw import draw_tokens
from kernels.step.seq_slot_tables import SeqSlotTables

_FEW = 512  # most likely tokens that are filtered before a whole row is sorted

# Philox-4x64-10.
_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_ROUNDS = 10
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def draw_on_cpu(logits: Tensor, tables: SeqSlotTables, slots: Tensor) -> Tensor:
    """Return a token per row, int64 [R], by the parameters of its slot.

    Args:
        logits: float32 [R, V]; not changed.
        slots: int32 [R]; a row with -1 gets the token 0.
    """
    chosen = slots.numpy()  # NumPy takes less time than torch for the columns of few rows
    rows = np.maximum(chosen, 0)

    def column(values: Tensor) -> NDArray[Any]:
        found: NDArray[Any] = values.numpy()[rows]
        return found if found.dtype == np.int32 else found.astype(np.float64)

    temperature = np.where(chosen >= 0, column(tables.temperature), 0.0)
    uniform = np.zeros(len(rows))
    if temperature.any():
        positions = column(tables.num_tokens) - column(tables.num_prompt_tokens)
        uniform = uniform_numbers(tables.seeds.numpy()[rows].view(np.uint64), positions)
    columns = (temperature, *map(column, (tables.top_k, tables.top_p, tables.min_p)), uniform)
    form = draw_with_torch if cpu.operations(logits) is None else draw_tokens
    token_ids = form(logits, *map(torch.from_numpy, columns))
    token_ids.numpy()[chosen < 0] = 0
    return token_ids


def draw_with_torch(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Do what `draw_tokens` does, in float64; greedy rows take the argmax alone."""
    drawn = temperature.nonzero()[:, 0]
    token_ids = logits.argmax(dim=-1)
    if not len(drawn):
        return token_ids
    logits = logits[drawn].double()
    # No temperature is rounded to 0 in float64, and none overflows below a maximum of 0.
    colder = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[drawn, None]
    probs = torch.softmax(colder, dim=-1)
    columns = (top_k[drawn, None], top_p[drawn, None], min_p[drawn, None])
    filtered = ((columns[0] > 0) | (columns[1] < 1) | (columns[2] > 0)).nonzero()[:, 0]
    if len(filtered):
        filters = TorchFilter(*(column[filtered] for column in columns))
        probs[filtered] = filters.apply(probs[filtered])
    token_ids[drawn] = _invert(probs, uniform[drawn, None])
    return token_ids


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


def uniform_numbers(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each seed and position, [R] each.

    They equal `np.random.Generator(np.random.Philox(key=seed, counter=position)).random()`, whose
    construction takes far longer than the draw: the first word of Philox-4x64-10 (Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", 2011). A preempted sequence, or one in another
    slot, continues with the same numbers.
    """
    # Words 0 and 2 of the counter in one array, 1 and 3 in the other. NumPy increments the counter
    # before it draws.
    even = np.zeros((2, len(seeds)), dtype=np.uint64)
    even[0] = positions.astype(np.uint64) + np.uint64(1)
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
