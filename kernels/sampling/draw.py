"""Sampling of each row's next token with temperature, top-k, top-p and min-p, without a sort.

A token is drawn by an exponential race (equivalent to the Gumbel-max trick): each token gets a
time, exponentially distributed with its weight as rate, and the earliest wins. The winner of a set
also wins in every subset that contains it. This is used three times.

Without filters, each program finds the winner of its chunk of a row: one pass.

Top-p needs no threshold. The race is run without top-p. One sum then decides whether top-p keeps
the winner: is the mass of all tokens that rank before it below top_p? If not, top-p drops all
tokens that do not rank before it, and the remaining ones race again, with the same times. The final
winner is the winner among the kept tokens alone. A fraction top_p of first winners is kept, and
each later race is among half of the mass on average.

Only a few groups of tokens are needed. The first pass stores the maximum of each group of 16
tokens, or of 32 if there are more than 2^17. The k groups with the largest maxima hold the k
largest logits, so that only k to 2k groups are read again. For top-p alone it is 512 to 1024
groups; if more than about the 512 largest tokens are kept, the row's one program reads the whole
row.

The top-k threshold is bisected on integers that sort as the logits do, ties are cut by index, and
masses are summed as integers. So the tokens are those of a stable sort, except for the rounding of
weights in float32, and depend neither on other rows nor on the order in which programs run.

Kernels and what they read, for R rows of V logits:

1. `scan_kernel`, R * V / 2048 programs: the logits. Writes the maxima of filtered rows.
2. `shortlist_kernel`, R programs: the maxima of filtered rows, once; it works in registers. Not
   launched if the host knows that no row has filters.
3. `draw_kernel`, R programs: a winner per chunk of unfiltered rows. Of filtered rows the listed
   groups, at most 64 KiB unless top_k is above 512, min_p small, or the whole row is read: about
   ten times for top-k, once and twice per race for top-p, once for min_p alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import device
from kernels.checks import (
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_output,
    check_shape,
)
from kernels.device import cdiv, next_power_of_2
from kernels.sampling import logit_order
from kernels.sampling.cpu_draw import draw_on_cpu
from kernels.sampling.draw_kernels import draw_kernel, scan_kernel, shortlist_kernel
from kernels.sampling.draw_rules import UNIT
from kernels.sampling.logit_order import group_size
from kernels.sampling.philox import exponentials_reference
from kernels.step.seq_slot_tables import SeqSlotTables

_MAX_VOCAB = 2**22  # such a number of weights of 2^40 fits into an int64


def sample_tokens(
    logits: Tensor,
    tables: SeqSlotTables,
    slots: Tensor,
    *,
    has_filters: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Return one token per row of `logits`; each depends only on its row and its slot.

    The filters are applied in turn to the tokens sorted by descending logit and ascending index:
    the first top_k stay; of these, those with at least min_p of the largest probability; of these,
    those before which the cumulative renormalised probability is below top_p. The random numbers
    are those of the slot's seed and the index of the token in its request's output. A row without
    an allowed token still returns a token. NaN counts as -inf and infinity as the largest float;
    not on a CPU, which draws other tokens too: see `cpu_draw`.

    Args:
        logits: float32 [R, V]; rows may be strided. Not changed.
        tables: `temperature`, filters, `seeds`, `num_tokens` and `num_prompt_tokens` are read.
        slots: int32 [R], where the parameters of each row are; -1 gives the token 0.
        has_filters: False if no row that is not greedy has a filter; the result is then the same,
            with one launch less.
        out: int64 [R], written to and returned; allocated by default.

    Returns:
        int64 [R].

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(logits, tables, slots)
    if out is not None:
        check_output("out", out, (logits.shape[0],), torch.int64, logits.device)
    if not device.runs_triton(logits):
        token_ids = draw_on_cpu(logits, tables, slots)
        return token_ids if out is None else out.copy_(token_ids)
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _launch(logits, tables, slots, out, has_filters)
    return out


def reference(logits: Tensor, tables: SeqSlotTables, slots: Tensor) -> Tensor:
    """Return the tokens of the kernels by sorting, in float64 and with their random numbers."""
    rows = slots.long().clamp(min=0)
    columns = (tables.temperature, tables.top_k, tables.top_p, tables.min_p, tables.seeds)
    positions = (tables.num_tokens - tables.num_prompt_tokens).long()
    token_ids = _reference(logits, *(column[rows] for column in (*columns, positions)))
    return torch.where(slots < 0, 0, token_ids)


def _reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
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
    # Equal scores: the lowest index wins.
    best = scores == scores.amax(-1, keepdim=True)
    drawn = torch.where(best, order, vocab).amin(-1)
    return torch.where(temperature > 0, drawn, order[:, 0])


class Settings(NamedTuple):
    """Division of a row into groups, chunks and tiles.

    Attributes:
        group: adjacent tokens of which the maximum is stored; a list holds whole groups.
        chunk: tokens per program of the scan; a multiple of 16 groups.
        tile: groups per iteration over a list.
        fewest: minimum number of listed groups for top-p alone.
    """

    group: int
    chunk: int
    tile: int
    fewest: int


def settings(vocab: int) -> Settings:
    """Return the division of rows of `vocab` logits.

    A chunk is 16 values per thread of 4 warps, and 63 programs for one row of 128k. A tile is 16
    values per thread of 16 warps, since each of these programs may have an SM to itself: 109 to
    121 registers. With half the values or half the warps ptxas targets two programs per SM and
    spills (sm_80, sm_100). 512 groups are one or two tiles.
    """
    group = group_size(vocab)
    return Settings(group, chunk=max(2048, 16 * group), tile=8192 // group, fewest=512)


def _launch(
    logits: Tensor, tables: SeqSlotTables, slots: Tensor, out: Tensor, has_filters: bool
) -> None:
    num_rows, vocab = logits.shape
    if not num_rows:
        return
    division = settings(vocab)
    # A multiple of 16 maxima per row allows vectorised loads. Those past the vocabulary are -inf.
    num_groups = 16 * cdiv(vocab, 16 * division.group)
    num_chunks = cdiv(vocab, division.chunk)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    params = {
        "slots_ptr": slots,
        "temperature_ptr": tables.temperature,
        "top_k_ptr": tables.top_k,
        "top_p_ptr": tables.top_p,
        "min_p_ptr": tables.min_p,
        "vocab": vocab,
        "num_groups": num_groups,
    }
    source = {
        "logits_ptr": logits,
        "row_stride": logits.stride(0),
        "seeds_ptr": tables.seeds,
        "num_tokens_ptr": tables.num_tokens,
        "num_prompt_tokens_ptr": tables.num_prompt_tokens,
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
    if has_filters:
        shortlist_kernel[(num_rows,)](
            **params,
            **lists,
            maxima_ptr=maxima,
            FEWEST=division.fewest,
            BLOCK=next_power_of_2(num_groups),
            num_warps=16,
        )
    draw_kernel[(num_rows,)](
        **params,
        **source,
        **lists,
        out_ptr=out,
        num_chunks=num_chunks,
        TILE=division.tile,
        CHUNKS=next_power_of_2(num_chunks),
        num_warps=16,
    )


def _check(logits: Tensor, tables: SeqSlotTables, slots: Tensor) -> None:
    check_dtype("logits", logits, torch.float32)
    check_shape("logits", logits, (None, None))
    if not 0 < logits.shape[1] <= _MAX_VOCAB:
        raise ValueError(f"logits: rows must have 1 to {_MAX_VOCAB} values (got {logits.shape[1]})")
    check_last_stride("logits", logits)
    check_dtype("slots", slots, torch.int32)
    check_shape("slots", slots, (logits.shape[0],))
    check_contiguous("slots", slots)
    for name, tensor in (("slots", slots), ("tables", tables.buffer)):
        check_device(name, tensor, logits.device)
