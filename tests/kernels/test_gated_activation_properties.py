import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.activation import ACTIVATIONS, Activation
from kernels.gated_activation import gated_activation, reference
from tests.kernels.support import TOLERANCES, assert_close, padded, randn


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 2500),
    st.sampled_from(list(TOLERANCES)),
    st.sampled_from(list(ACTIVATIONS)),
    st.sampled_from([0.1, 1.0, 10.0]),
)
def test_any_shape(
    rows: int, size: int, dtype: torch.dtype, activation: Activation, scale: float
) -> None:
    gate_up = padded(randn(rows, 2 * size, dtype=dtype) * scale)
    assert_close(gated_activation(gate_up, activation), reference(gate_up, activation))
