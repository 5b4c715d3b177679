"""Drawing the next token of each row, with temperature, top-k, top-p and min-p; nothing is sorted.

A token is drawn by a race: each gets a time, exponentially distributed with its weight as rate,
and the earliest wins (the Gumbel-max trick, in other words). The winner of a set wins in every
part of it that it belongs to. This serves three times.

Where nothing is filtered, each program finds the winner of its part of a row: one pass.

Top-p needs no threshold. The race is held without it. Of the winner it takes one sum to see if
top-p keeps it: is the mass of all that rank before it short of top_p? If not, top-p drops all that
do not rank before it, and those race again, with the same times. In the end wins who wins among
the kept ones alone. A fraction top_p of the first winners is kept, and each later race is among
half of the mass, in the mean.

Small parts are enough. The first pass leaves the maximum of each group of 16 tokens, or of 32 if
there are more than 2^17. The k groups with the largest maxima hold the k largest logits, so that
only k to 2k groups are looked at again. For top-p alone it is 512 to 1024 groups; where more than
the 512 largest tokens or so are kept, the row is read as a whole, by its one program.

The top-k threshold is bisected on integers that sort as the logits do, ties are cut by index, and
masses are summed as integers. So the tokens are those of a stable sort, but for the rounding of
weights in float32, and depend on no other row and not on the order in which programs run.

Kernels and what they read, for R rows of V logits:

1. `scan_kernel`, R * V / 2048 programs: the logits. Writes the maxima of filtered rows.
2. `shortlist_kernel`, R programs: the maxima of filtered rows, once; it works in registers.
3. `draw_kernel`, R programs: of other rows a winner per chunk. Of filtered ones the listed groups,
   which are 64 KiB at most unless top_k is above 512, min_p small, or the row read as a whole: for
   top-k about ten times, for top-p once and twice per race, for min_p alone once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels import device
from kernels.checks import (
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)
from kernels.sampling import logit_order
from kernels.sampling.draw_kernels import draw_kernel, scan_kernel, shortlist_kernel
from kernels.sampling.draw_rules import UNIT
from kernels.sampling.logit_order import group_size
from kernels.sampling.philox import exponentials_reference

_MAX_VOCAB = 2**22  # so many weights of 2^40 fit into an int64


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Return one token per row of `logits`; each depends on nothing but its row of the arguments.

    The filters act one after the other, on the tokens sorted by falling logit and rising index:
    the first top_k stay; of these, those with at least min_p of the largest probability; of
    these, each before which there is less than top_p of the probability that is left. NaN counts
    as -inf and infinity as the largest float; a row that allows nothing gives a token all the same.

    Args:
        logits: float32 [R, V]; rows may lie apart. Not changed.
        temperature: float32 [R]; 0 takes the first of the largest logits.
        top_k: int32 [R]; 0 keeps every token.
        top_p: float32 [R]; 1 keeps every token. The first token stays even at 0.
        min_p: float32 [R] in [0, 1]; 0 keeps every token.
        seeds: int64 [R], the bits of a uint64: the request's.
        positions: int64 [R], of the tokens to be drawn among the output of their requests.

    Returns:
        int64 [R].

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    rows = (temperature, top_k, top_p, min_p, seeds, positions)
    _check(logits, *rows)
    if not device.runs_triton(logits):
        return reference(logits, *rows)
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _launch(logits, *rows, out)
    return out


def reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Return the same by sorting, in float64 and with the very same random numbers."""
    vocab = logits.shape[1]
    values, order = (
        logit_order.reference(logits).double().sort(dim=-1, descending=True, stable=True)
    )
    heat = temperature.double().clamp(2.0**-100, 2.0**100)[:, None]
    weights = ((values - values[:, :1].nan_to_num(neginf=0.0)) / heat).exp()
    ranks = torch.arange(vocab, device=logits.device)
    top_k = torch.where(top_k > 0, top_k, vocab)[:, None]
    kept = (ranks < top_k) & (weights >= min_p.double()[:, None])

    masses = (weights * UNIT.value).long() * kept
    before = masses.cumsum(-1) - masses
    share = (top_p.double() * masses.sum(-1).double()).ceil().long().clamp(min=1)
    kept &= (before < share[:, None]) | (top_p >= 1)[:, None]

    times = exponentials_reference(seeds, positions, vocab).gather(-1, order)
    scores = torch.where(kept, weights / times, -1.0)
    # Of equal scores the first index wins.
    best = scores == scores.amax(-1, keepdim=True)
    drawn = torch.where(best, order, vocab).amin(-1)
    return torch.where(temperature > 0, drawn, order[:, 0])


class Settings(NamedTuple):
    """How rows are divided.

    Attributes:
        group: neighbouring tokens of which the maximum is kept; a list holds whole groups.
        chunk: tokens per program of the scan; a multiple of 16 groups.
        tile: groups that a pass over a list takes at once.
        fewest: groups that are listed for top-p alone, at least.
    """

    group: int
    chunk: int
    tile: int
    fewest: int


def settings(vocab: int) -> Settings:
    """Return the division of rows of `vocab` logits.

    A chunk is 16 values per thread of 4 warps, and 63 programs for one row of 128k. A tile is 16
    values per thread of 16 warps, since each of these programs may have an SM to itself: 109 to
    121 registers. With half the values, or half the warps, ptxas hopes for two programs on an SM
    and spills (sm_80, sm_100). 512 groups are a tile or two.
    """
    group = group_size(vocab)
    return Settings(group, chunk=max(2048, 16 * group), tile=8192 // group, fewest=512)


def _launch(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    out: Tensor,
) -> None:
    num_rows, vocab = logits.shape
    if not num_rows:
        return
    division = settings(vocab)
    # Rows of a multiple of 16 maxima are read in wide loads. What is beyond the vocabulary is -inf.
    num_groups = 16 * triton.cdiv(vocab, 16 * division.group)
    num_chunks = triton.cdiv(vocab, division.chunk)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    params = {
        "temperature_ptr": temperature,
        "top_k_ptr": top_k,
        "top_p_ptr": top_p,
        "min_p_ptr": min_p,
        "vocab": vocab,
        "num_groups": num_groups,
    }
    source = {
        "logits_ptr": logits,
        "row_stride": logits.stride(0),
        "seeds_ptr": seeds,
        "positions_ptr": positions,
        "peaks_ptr": new(torch.float32, num_chunks),
        "winners_ptr": new(torch.int32, num_chunks),
        "masses_ptr": new(torch.int64, num_chunks),
        "GROUP": division.group,
    }
    maxima = new(torch.float32, num_groups)
    lists = {
        "lists_ptr": new(torch.int32, num_groups),
        "lengths_ptr": new(torch.int32),
        "bounds_ptr": new(torch.float32),
    }
    scan_kernel[(num_chunks, num_rows)](
        **params,
        **source,
        maxima_ptr=maxima,
        GROUPS=division.chunk // division.group,
        num_warps=4,
    )
    shortlist_kernel[(num_rows,)](
        **params,
        **lists,
        maxima_ptr=maxima,
        FEWEST=division.fewest,
        BLOCK=triton.next_power_of_2(num_groups),
        num_warps=16,
    )
    draw_kernel[(num_rows,)](
        **params,
        **source,
        **lists,
        out_ptr=out,
        num_chunks=num_chunks,
        TILE=division.tile,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=16,
    )


def _check(logits: Tensor, *rows: Tensor) -> None:
    check_dtype("logits", logits, torch.float32)
    check_shape("logits", logits, (None, None))
    if not 0 < logits.shape[1] <= _MAX_VOCAB:
        raise ValueError(f"logits: rows must have 1 to {_MAX_VOCAB} values (got {logits.shape[1]})")
    check_last_stride("logits", logits)
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    for name, row, dtype in zip(names, rows, dtypes, strict=True):
        check_dtype(name, row, dtype)
        check_shape(name, row, (logits.shape[0],))
        check_device(name, row, logits.device)
        check_contiguous(name, row)
