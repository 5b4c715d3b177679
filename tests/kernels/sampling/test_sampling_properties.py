from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import draw, logprobs
from tests.kernels.sampling.draw_cases import SMALL, rows_of
from tests.kernels.sampling.test_adjust_logits import Row, check_rows
from tests.kernels.sampling.test_logprobs import assert_same
from tests.kernels.support import DEVICE, randn

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|divide by zero|invalid value):RuntimeWarning"
)

vocabs = st.integers(1, 300)
seeds = st.integers(0, 2**20)
# Odd numbers: sums of weights that are equal in float32 are equal exactly.
filters = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.21, 0.7, 1.9, 7.3]),
        "top_k": st.integers(0, 320),
        "top_p": st.sampled_from([0.0, 0.013, 0.31, 0.77, 0.951, 0.9991, 1.0]),
        "min_p": st.sampled_from([0.0, 0.00031, 0.053, 0.71, 1.0]),
    },
)


def some_logits(rows: int, vocab: int, seed: int, ties: bool, forbidden: float) -> torch.Tensor:
    """Return logits of which some are -inf, and a few NaN."""
    logits = randn(rows, vocab, seed=seed) * 3
    logits = (logits * 4).round() / 4 if ties else logits
    chance = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    logits[chance < forbidden] = -torch.inf
    logits[chance < forbidden / 8] = torch.nan
    return logits


@given(
    st.lists(filters, min_size=1, max_size=3),
    vocabs,
    seeds,
    st.booleans(),
    st.sampled_from([0.0, 0.5, 0.98]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_draws(
    rows: list[dict[str, float]],
    vocab: int,
    seed: int,
    ties: bool,
    forbidden: float,
    small: bool,
) -> None:
    logits, columns = some_logits(len(rows), vocab, seed, ties, forbidden), rows_of(rows, seed)
    division = SMALL if small else draw.settings(vocab)
    with mock.patch.object(draw, "settings", return_value=division):
        drawn = draw.sample_tokens(logits, *columns)
    assert drawn.tolist() == draw.reference(logits, *columns).tolist()


@given(vocabs, seeds, st.booleans(), st.sampled_from([0.0, 0.5]), st.data())
@settings(max_examples=15, deadline=None)
def test_logprobs(vocab: int, seed: int, ties: bool, forbidden: float, data: st.DataObject) -> None:
    logits = some_logits(2, vocab, seed, ties, forbidden).nan_to_num(nan=-9.0, neginf=-9.0)
    token_ids = torch.tensor(
        data.draw(st.lists(st.integers(0, vocab - 1), min_size=2, max_size=2)), device=DEVICE
    )
    division = data.draw(st.sampled_from([(4, 64), logprobs.settings(vocab)]))
    with mock.patch.object(logprobs, "settings", return_value=division):
        assert_same(logits, token_ids, data.draw(st.integers(0, min(vocab, 36))))


token_sets = st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=9)


@given(
    st.lists(
        st.builds(
            Row,
            bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100, width=32), max_size=6),
            penalties=st.fixed_dictionaries(
                {},
                optional={
                    "repetition": st.floats(0.5, 2.0, width=32),
                    "presence": st.floats(-2, 2, width=32),
                    "frequency": st.floats(-2, 2, width=32),
                },
            ),
            allowed=token_sets,
            mask=token_sets,
            stops=st.lists(st.integers(0, 99), max_size=5),
            min_tokens=st.integers(0, 5),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(100, 2100),
)
@settings(max_examples=20, deadline=None)
def test_adjustments(rows: list[Row], vocab: int) -> None:
    check_rows(rows, vocab)
