from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.step.token_scatter import scatter_tokens
from tests.kernels.slot_cases import assert_tables_equal, ints, longs, random_tables
from tests.kernels.step.test_token_scatter import from_lists


@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 39), st.integers(0, 5)), unique_by=lambda row: row[0]),
    st.sampled_from([(60, 4), (2, 1), (9, 130)]),
)
@settings(max_examples=25, deadline=None)
def test_tokens_are_appended(
    seed: int, rows: list[tuple[int, int]], lengths: tuple[int, int]
) -> None:
    max_model_len, max_stop_token_ids = lengths
    tables = random_tables(
        40,
        max_model_len=max_model_len,
        max_stop_token_ids=max_stop_token_ids,
        vocab=6,
        seed=seed,
    )
    slots = [slot - (slot == 0) for slot, _ in rows]
    token_ids = [token_id for _, token_id in rows]
    expected, reasons = from_lists(tables, slots, token_ids)
    found = scatter_tokens(tables, ints(*slots), longs(*token_ids))
    assert torch.equal(found, ints(*reasons))
    assert_tables_equal(tables, expected)
