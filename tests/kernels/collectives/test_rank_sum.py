"""Sums over ranks, each in a process: the kernels meet there as they do on GPUs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.collectives.peers import Peers
from kernels.collectives.rank_sum import (
    MOST_BYTES,
    MOST_ROW_BYTES,
    rank_sum,
    rank_sum_norm,
    reference,
)
from kernels.rms_norm import rms_norm_add
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.kernels.collectives.checks import different_bits, different_replays
from tests.kernels.collectives.forked_ranks import ForkedRanks
from tests.kernels.support import assert_close, randn

pytestmark = pytest.mark.skipif(
    not device.INTERPRETED, reason="on a GPU tests/gpu/test_ranks.py tests them"
)

# A part of a block; blocks of all programs, with a remainder; of some programs two, of some one.
SHAPES = [(1, 1), (3, 63), (37, 1000), (5, 9001)]
DTYPES = (torch.float32, torch.float16)
Case = tuple[list[Tensor], bool]


def parts(size: int, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [randn(*shape, dtype=dtype, seed=100 * seed + rank) for rank in range(size)]


def test_reference_is_the_sum() -> None:
    xs = parts(5, (3, 7), torch.float32)
    assert_close(reference(xs), torch.stack(xs).double().sum(0).float())


def run_cases(cases: list[Case], peers: Peers) -> list[Tensor]:
    return [rank_sum(xs[peers.rank], peers, is_two_shot=two_shot) for xs, two_shot in cases]


# How many ranks, with how many of the cases.
@pytest.mark.parametrize(
    ("size", "num_cases"),
    [(3, 10), (8, 3), *(pytest.param(size, 16, marks=pytest.mark.large) for size in range(2, 9))],
)
def test_sum_in_one_shot_and_two_has_the_bits_of_the_order_of_ranks(
    size: int, num_cases: int
) -> None:
    cases = [
        (parts(size, shape, dtype), is_two_shot)
        for shape in SHAPES
        for dtype in DTYPES
        for is_two_shot in (False, True)
    ]
    cases = random.Random(size).sample(cases, num_cases)
    for sums in ForkedRanks(size).run(partial(run_cases, cases)):
        for found, (xs, _) in zip(sums, cases, strict=True):
            assert torch.equal(found, reference(xs).to(found.dtype))


def test_sum_in_bfloat16_of_whole_numbers_is_exact() -> None:
    """The interpreter rounds to bfloat16 in a way of its own."""
    xs = [part.mul(8).round().bfloat16() for part in parts(3, (5, 70), torch.float32)]
    cases = [(xs, False), (xs, True)]
    for sums in ForkedRanks(3).run(partial(run_cases, cases)):
        for found in sums:
            assert torch.equal(found.float(), reference(xs))


def test_largest_sum_fits_the_buffer() -> None:
    cases = [(parts(2, (2, MOST_BYTES // 8), torch.float32), two_shot) for two_shot in (0, 1)]
    for sums in ForkedRanks(2).run(partial(run_cases, cases)):
        for found, (xs, _) in zip(sums, cases, strict=True):
            assert torch.equal(found, reference(xs))


def test_sums_of_ranks_that_are_late_in_turn_take_no_value_of_another_sum() -> None:
    cases = [(parts(3, (1 + i % 3, 700), torch.float32, i), i % 3 == 0) for i in range(30)]
    ranks = ForkedRanks(3)
    for sums in ranks.run(partial(run_cases, cases), delays=[0.0] * 7 + [0.01]):
        for found, (xs, _) in zip(sums, cases, strict=True):
            assert torch.equal(found, reference(xs))
    again = ranks.run(partial(run_cases, cases[:3]))  # goes on where the processes have ended
    assert torch.equal(again[0][2], reference(cases[2][0]))


def test_sums_and_norms_have_the_bits_that_they_must_have_on_any_device() -> None:
    def run(peers: Peers) -> list[str]:
        found = list(different_bits(peers, list(DTYPES)))
        return found + list(different_replays(peers, DTYPES[0], capture, num_replays=3))

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        return ReplayingCapturer().capture(work).replay

    assert ForkedRanks(3).run(run) == [[]] * 3


# Several rows per program, with a remainder; more rows than programs; a row of the most bytes.
@pytest.mark.parametrize("shape", [(77, 100), (35, 896), (2, MOST_ROW_BYTES // 4)], ids=str)
def test_norm_of_a_sum_has_the_bits_of_sum_and_norm(shape: tuple[int, int]) -> None:
    def run(peers: Peers) -> list[bool]:
        found = []
        for dtype, unit_offset in itertools.product(DTYPES, (False, True)):
            x = parts(2, shape, dtype)[peers.rank]
            residual, weight = randn(*shape, dtype=dtype, seed=7), randn(shape[1], dtype=dtype)
            total = rank_sum(x, peers)
            expected = rms_norm_add(total, residual, weight, 1e-5, unit_offset=unit_offset)
            normed = rank_sum_norm(x, residual, weight, 1e-5, peers, unit_offset=unit_offset)
            found += [torch.equal(*pair) for pair in zip(expected, normed, strict=True)]
        return found

    assert all(map(all, ForkedRanks(2).run(run)))


def test_wait_for_a_rank_that_does_not_come_ends_when_it_is_aborted() -> None:
    ranks = ForkedRanks(2)

    def run(peers: Peers) -> bool:
        if peers.rank:
            time.sleep(0.3)
            ranks.peers[0].aborted.fill_(1)
        else:
            rank_sum(randn(1, 8), peers)
        return True

    assert ranks.run(run) == [True, True]


def test_sum_without_rows_meets_nobody() -> None:
    (peers, _) = ForkedRanks(2).peers
    x = randn(0, 8)
    assert rank_sum(x, peers).shape == (0, 8)
    normed, total = rank_sum_norm(x, x, randn(8), 1e-5, peers, unit_offset=False)
    assert normed.shape == total.shape == (0, 8)


def test_wrong_arguments_of_a_sum_are_named() -> None:
    (peers, _) = ForkedRanks(2).peers
    x, weight = randn(2, 8), randn(8)
    norm = partial(rank_sum_norm, eps=1e-5, peers=peers, unit_offset=False)
    with pytest.raises(ValueError, match="x: must be"):
        rank_sum(x.int(), peers)
    with pytest.raises(ValueError, match=r"x: must have shape \[any, any\]"):
        rank_sum(x[0], peers)
    with pytest.raises(ValueError, match="x: must be contiguous"):
        rank_sum(x.t(), peers)
    with pytest.raises(ValueError, match="x: must be on"):
        rank_sum(x.to("meta"), peers)
    with pytest.raises(ValueError, match="x: must have at most 1048576 bytes"):
        rank_sum(randn(2, MOST_BYTES // 8 + 1), peers)
    with pytest.raises(ValueError, match="x: a row must have at most 16384 bytes"):
        norm(wide := randn(1, MOST_ROW_BYTES // 4 + 1), wide, wide[0])
    with pytest.raises(ValueError, match="residual: must have shape"):
        norm(x, x[:1], weight)
    with pytest.raises(ValueError, match=r"weight: must be torch\.float32"):
        norm(x, x, weight.half())
