from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.slot_cases import random_tables
from tests.kernels.step.serving_simulation import Host
from tests.kernels.step.test_step_inputs import check


@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from([1, 3, 16, 64]))
@settings(max_examples=6, deadline=None)
def test_serving_one_step_ahead(seed: int, num_sequences: int, block_size: int) -> None:
    Host(seed, num_sequences=num_sequences, block_size=block_size).run()


@given(
    st.integers(0, 2**32),
    st.lists(
        st.tuples(st.integers(0, 8), st.booleans(), st.integers(0, 70)), unique_by=lambda r: r[0]
    ),
    st.integers(0, 9),
    st.sampled_from([(60, 16), (61, 7), (5, 64), (1, 1)]),
)
@settings(max_examples=25, deadline=None)
def test_steps(
    seed: int, rows: list[tuple[int, bool, int]], padding: int, lengths: tuple[int, int]
) -> None:
    max_model_len, block_size = lengths
    tables = random_tables(9, max_model_len=max_model_len, block_size=block_size, seed=seed)
    left = (tables.num_tokens - tables.num_computed_tokens).tolist()
    starts = [0]
    for slot, all_of_it, num_tokens in rows:
        starts.append(starts[-1] + (left[slot] if all_of_it else num_tokens))
    slots = [slot if slot else -1 for slot, *_ in rows]
    check(tables, slots, starts, starts[-1] + padding, block_size)
