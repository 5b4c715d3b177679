"""Top-n-sigma and locally typical sampling: the tokens that they drop are forbidden.

Top-n-sigma (Tang et al., "Top-n-sigma: Not all logits are you need", 2024) keeps the logits within
n standard deviations of the largest one. Locally typical sampling (Meister et al., 2022) keeps the
tokens whose information -log p is nearest to the entropy, until they have a given probability. With
p = exp(logit / temperature) / Z the distance between the two is that of the logit from the expected
logit, divided by the temperature: the tokens kept are those within a radius of the expected logit.

A program handles a row, and returns at once if the row wants none of it. It reads the row twice for
the deviation and the expected logit. The radius is bisected on integers that sort as the distances
do, with masses summed as integers, so that ties are kept together and no order of summation shows:
5 to 23 passes over rows of 32k to 128k normally distributed logits, which lie in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cpu, device
from kernels.checks import (
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)
from kernels.cpu.truncate import truncate_rows
from kernels.sampling import logit_order
from kernels.sampling.draw_rules import inverse_temperature, mass, weight
from kernels.sampling.logit_order import cleaned, from_key, to_key
from kernels.step.seq_slot_tables import SeqSlotTables

_INFINITE_KEY = tl.constexpr(0x7F800000)  # of an infinite distance


def truncate_logits(logits: Tensor, tables: SeqSlotTables, slots: Tensor) -> None:
    """Forbid the tokens that `top_n_sigma` drops, then those that `typical_p` drops of the rest.

    The deviation is that of the tokens that are not forbidden yet. Of tokens equally near to the
    expected logit all are kept or none. NaN counts as -inf and infinity as the largest float. A row
    that is greedy, or has neither, is left as it is.

    Args:
        logits: float32 [R, V]; rows may be strided. Changed in place.
        tables: `temperature`, `top_n_sigma` and `typical_p` are read.
        slots: int32 [R]; a row with -1 is left as it is.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(logits, tables, slots)
    if device.runs_triton(logits):
        if logits.numel():
            _launch(logits, tables, slots)
        return
    rows = slots.long().clamp(min=0)
    temperature = torch.where(slots >= 0, tables.temperature[rows], 0.0)
    form = _torch if cpu.operations(logits) is None else truncate_rows
    form(logits, temperature, tables.top_n_sigma[rows], tables.typical_p[rows])


def reference(logits: Tensor, tables: SeqSlotTables, slots: Tensor) -> Tensor:
    """Return the logits with those dropped at -inf, found by sorting, in float64."""
    logits = logits.clone()
    rows = slots.long().clamp(min=0)
    temperature = torch.where(slots >= 0, tables.temperature[rows], 0.0)
    _torch(logits, temperature, tables.top_n_sigma[rows], tables.typical_p[rows])
    return logits


def _torch(logits: Tensor, temperature: Tensor, top_n_sigma: Tensor, typical_p: Tensor) -> None:
    some = ((temperature > 0) & ((top_n_sigma > 0) | (typical_p < 1))).nonzero()[:, 0]
    columns = (temperature, top_n_sigma, typical_p)
    heat, sigmas, share = (column[some, None].double() for column in columns)
    if not len(some) or not logits.shape[1]:
        return
    x = logit_order.reference(logits[some]).double()
    possible = x > -torch.inf
    peak = x.amax(-1, keepdim=True)
    count = possible.sum(-1, keepdim=True)
    mean = x.where(possible, 0.0).sum(-1, keepdim=True) / count
    variance = (x - mean).square().where(possible, 0.0).sum(-1, keepdim=True) / count
    floor = torch.where(sigmas > 0, peak - sigmas * variance.sqrt(), -torch.inf)
    left = possible & (x >= floor.float())
    below = (x - peak).where(left, 0.0)
    weights = (below / heat.clamp(2.0**-100, 2.0**100)).exp().where(left, 0.0)
    total = weights.sum(-1, keepdim=True)
    centre = (peak + (weights * below).sum(-1, keepdim=True) / total).float()
    distance, order = (x.float() - centre).abs().where(left, torch.inf).sort(-1)
    reached = weights.gather(-1, order).cumsum(-1) >= share * total
    last = reached.int().argmax(-1, keepdim=True)  # the first that reaches it
    radius = torch.where(share < 1, distance.gather(-1, last), torch.inf)
    kept = left & ((x.float() - centre).abs() <= radius)
    logits[some] = logits[some].masked_fill(~kept, -torch.inf)


@triton.jit
def _kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_n_sigma_ptr,
    typical_p_ptr,
    row_stride,
    vocab,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i_row).to(tl.int64)
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot)
    sigmas, typical_p = tl.load(top_n_sigma_ptr + slot), tl.load(typical_p_ptr + slot)
    if (temperature <= 0.0) | ((sigmas <= 0.0) & (typical_p >= 1.0)):
        return
    p_row = logits_ptr + i_row * row_stride
    peak, floor = _floor(p_row, sigmas, vocab, TILE)
    centre, radius = peak, float("inf")
    if typical_p < 1.0:
        rate = inverse_temperature(temperature)
        centre, total = _expected(p_row, peak, floor, rate, vocab, TILE)
        target = tl.ceil(typical_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        radius = _radius(p_row, peak, floor, rate, centre, target, vocab, TILE)
    for start in range(0, vocab, TILE):
        b_logits, o_tokens = _tile(p_row, start, vocab, TILE)
        m_kept = (b_logits > float("-inf")) & (b_logits >= floor)
        m_kept &= tl.abs(b_logits - centre) <= radius
        tl.store(p_row + o_tokens, float("-inf"), mask=(o_tokens < vocab) & (m_kept == 0))


@triton.jit
def _tile(p_row, start, vocab, TILE: tl.constexpr):
    """Return the logits from `start` on, and their tokens; -inf after the last."""
    o_tokens = start + tl.arange(0, TILE)
    b_logits = tl.load(p_row + o_tokens, mask=o_tokens < vocab, other=float("-inf"))
    return cleaned(b_logits), o_tokens


@triton.jit
def _floor(p_row, sigmas, vocab, TILE: tl.constexpr):
    """Return the largest logit, and the lowest that top-n-sigma keeps."""
    b_peaks = tl.full([TILE], float("-inf"), tl.float32)
    b_counts = tl.zeros([TILE], tl.int32)
    b_sums, b_squares = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for start in range(0, vocab, TILE):
        b_logits, _ = _tile(p_row, start, vocab, TILE)
        m = b_logits > float("-inf")
        b_values = tl.where(m, b_logits, 0.0).to(tl.float64)
        b_peaks = tl.maximum(b_peaks, b_logits)
        b_counts += m.to(tl.int32)
        b_sums += b_values
        b_squares += b_values * b_values
    peak, count = tl.max(b_peaks), tl.maximum(tl.sum(b_counts), 1)
    mean, squares = tl.sum(b_sums) / count, tl.sum(b_squares)
    deviation = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
    floor = (peak.to(tl.float64) - sigmas.to(tl.float64) * deviation).to(tl.float32)
    return peak, tl.where(sigmas > 0.0, floor, float("-inf"))


@triton.jit
def _expected(p_row, peak, floor, rate, vocab, TILE: tl.constexpr):
    """Return the expected logit of the tokens from `floor` up, and their mass."""
    b_masses = tl.zeros([TILE], tl.int64)
    b_sums, b_moments = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for start in range(0, vocab, TILE):
        b_logits, _ = _tile(p_row, start, vocab, TILE)
        b_weights = tl.where(b_logits >= floor, weight(b_logits, peak, rate), 0.0)
        b_below = tl.where(b_weights > 0.0, b_logits - peak, 0.0)
        b_masses += mass(b_weights)
        b_sums += b_weights.to(tl.float64)
        b_moments += (b_weights * b_below).to(tl.float64)
    centre = peak.to(tl.float64) + tl.sum(b_moments) / tl.sum(b_sums)
    return centre.to(tl.float32), tl.sum(b_masses)


@triton.jit
def _radius(p_row, peak, floor, rate, centre, target, vocab, TILE: tl.constexpr):
    """Return the smallest distance from `centre` within which the tokens have the mass `target`.

    Each step moves an end to a distance that occurs.
    """
    low, high = tl.full([], -1, tl.int64), tl.full([], _INFINITE_KEY, tl.int64)
    while high - low > 1:
        middle = from_key((low + (high - low) // 2).to(tl.int32))
        b_masses = tl.zeros([TILE], tl.int64)
        b_within = tl.full([TILE], -1.0, tl.float32)
        b_beyond = tl.full([TILE], float("inf"), tl.float32)
        for start in range(0, vocab, TILE):
            b_logits, _ = _tile(p_row, start, vocab, TILE)
            b_distance = tl.abs(b_logits - centre)
            m = (b_logits > float("-inf")) & (b_logits >= floor)
            m_within = m & (b_distance <= middle)
            b_masses += tl.where(m_within, mass(weight(b_logits, peak, rate)), 0)
            b_within = tl.maximum(b_within, tl.where(m_within, b_distance, -1.0))
            m_beyond = m & (b_distance > middle)
            b_beyond = tl.minimum(b_beyond, tl.where(m_beyond, b_distance, float("inf")))
        if tl.sum(b_masses) >= target:
            high = to_key(tl.max(b_within)).to(tl.int64)
        else:
            low = to_key(tl.min(b_beyond)).to(tl.int64) - 1
    return from_key(high.to(tl.int32))


def settings() -> dict[str, int]:
    """Return tokens per tile, and warps: one access of 16 bytes per thread.

    The sums of a thread are in 8 bytes each. With twice the values ptxas spills (sm_80).
    """
    return {"TILE": 2048, "num_warps": 16}


def _launch(logits: Tensor, tables: SeqSlotTables, slots: Tensor) -> None:
    num_rows, vocab = logits.shape
    _kernel[(num_rows,)](
        logits_ptr=logits,
        slots_ptr=slots,
        temperature_ptr=tables.temperature,
        top_n_sigma_ptr=tables.top_n_sigma,
        typical_p_ptr=tables.typical_p,
        row_stride=logits.stride(0),
        vocab=vocab,
        **settings(),
    )


def _check(logits: Tensor, tables: SeqSlotTables, slots: Tensor) -> None:
    check_dtype("logits", logits, torch.float32)
    check_shape("logits", logits, (None, None))
    check_last_stride("logits", logits)
    check_dtype("slots", slots, torch.int32)
    check_shape("slots", slots, (logits.shape[0],))
    check_contiguous("slots", slots)
    for name, tensor in (("slots", slots), ("tables", tables.buffer)):
        check_device(name, tensor, logits.device)
