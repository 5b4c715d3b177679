"""Which tokens top-k, top-p and min-p keep, to the token."""

import math

import pytest
import torch
from torch import Tensor

from kernels.sampling.draw import reference, sample_tokens
from kernels.sampling.philox import exponentials_reference
from tests.kernels.sampling.draw_cases import rows_of
from tests.kernels.support import DEVICE, randn

# NumPy warns where the interpreter overflows to infinity as intended.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def assert_keeps(logits: Tensor, row: dict[str, float], kept: int) -> None:
    """Assert that exactly the first `kept` tokens of `logits`, by rank, can be sampled.

    From many seeds the kernel gets some that sample the last of these tokens, some that would
    sample the next one if it were kept, and the first seed.
    """
    rows, given = rows_of([row] * 700), logits.expand(700, -1)
    expected = reference(given, *rows)
    order = logits.argsort(descending=True, stable=True)
    times = exponentials_reference(rows.tables.seeds, rows.positions, len(logits))
    times = times[:, order[: kept + 1]]
    drawn_last, next_is_first = expected == order[kept - 1], times.argmin(-1) == kept
    assert torch.isin(expected, order[:kept]).all()
    seeds = [mask.nonzero()[:1, 0] for mask in (drawn_last, next_is_first)]
    assert seeds[0].numel()
    part = torch.cat([*seeds, torch.zeros_like(seeds[0][:1])])
    drawn = sample_tokens(given[part], *rows.take(part))
    assert drawn.tolist() == expected[part].tolist()


HOT = {"temperature": 1e30}  # all allowed tokens have weight 1


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"top_k": 70}, 70),
        ({"top_k": 3}, 3),
        # Of 129 equal ones, the first 65 have less than half of the mass before them.
        ({"top_p": 0.5}, 65),
        ({"top_k": 96, "top_p": 0.125}, 12),
    ],
    ids=str,
)
def test_ties_are_cut_by_index(row: dict[str, float], kept: int) -> None:
    logits = torch.full((129,), -1.5, device=DEVICE)
    logits[60:70] = 1.0
    assert_keeps(logits, {**row, **HOT}, kept)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"top_k": 2, **HOT}, 2),
        ({"top_k": 8, **HOT}, 8),
        ({"top_k": 45, **HOT}, 45),
        ({"top_p": 0.031, **HOT}, 10),
        ({"top_k": 40, "top_p": 0.51, **HOT}, 21),
    ],
    ids=str,
)
def test_filters_keep_exactly(row: dict[str, float], kept: int) -> None:
    assert_keeps(randn(301), row, kept)


@pytest.mark.usefixtures("small")
def test_top_p_is_of_the_mass_that_min_p_left() -> None:
    logits = torch.zeros(301, device=DEVICE)
    logits[1::2] = -4.0  # 150 tokens of weight 0.018, and 151 of weight 1
    assert_keeps(logits, {"min_p": 0.1, "top_p": 0.099}, 15)


@pytest.mark.usefixtures("small")
def test_masses_of_all_parts_of_a_row_are_of_one_scale() -> None:
    logits = torch.full((301,), -torch.inf, device=DEVICE)
    logits[10:20], logits[270:290] = 3.0, 3.0 - 10 * math.log(2)
    # Ten tokens of weight 1, and twenty of 2^-10.
    assert_keeps(logits, {"top_p": 0.45}, 5)


@pytest.mark.usefixtures("small")
def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.full((8, 40), -1.0, device=DEVICE)
    logits[:4, 5:10], logits[:4, 10:15] = -0.0, 0.0
    logits[4:, 5:10], logits[4:, 10:15] = 0.0, -0.0
    rows = rows_of([{"top_k": 7, "temperature": 1e30}] * 8)
    assert sample_tokens(logits, *rows).tolist() == reference(logits, *rows).tolist()
