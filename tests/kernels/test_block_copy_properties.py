from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.block_copy import BlockCopier, Copy, reference
from tests.kernels.test_block_copy import (
    assert_same_bytes,
    check_chains,
    random_caches,
    split,
)

NUM_BLOCKS = 8
# Distinct destinations, arbitrary sources: chains, trees and cycles.
some_copies = st.lists(
    st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1)),
    unique_by=lambda copy: copy[1],
    max_size=NUM_BLOCKS,
)


@given(some_copies)
@settings(max_examples=200, deadline=None)
def test_chains(copies: list[Copy]) -> None:
    check_chains(copies, NUM_BLOCKS)


@given(
    some_copies,
    st.sampled_from([(16, 1, 64), (16, 3, 80), (2, 8)]),
    st.sampled_from([torch.float16, torch.float8_e4m3fn]),
    st.integers(1, 2),
)
@settings(max_examples=20, deadline=None)
def test_copies(
    copies: list[Copy], shape: tuple[int, ...], dtype: torch.dtype, num_layers: int
) -> None:
    caches = random_caches(num_layers, shape, dtype, num_blocks=NUM_BLOCKS)
    expected = reference(caches, *split(copies))
    BlockCopier(caches).copy(*split(copies))
    assert_same_bytes(caches, expected)
