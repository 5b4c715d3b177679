import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.layer_norm import layer_norm, layer_norm_add, reference
from tests.kernels.support import TOLERANCES, assert_close, padded, randn


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(2, 3000),
    st.sampled_from(list(TOLERANCES)),
    st.booleans(),
    st.sampled_from([-2.0, 0.0, 5.0]),
)
def test_any_shape(rows: int, size: int, dtype: torch.dtype, with_bias: bool, mean: float) -> None:
    x, weight = padded(randn(rows, size, dtype=dtype) + mean), randn(size, dtype=dtype, seed=1)
    bias = randn(size, dtype=dtype, seed=3) if with_bias else None
    residual = randn(rows, size, dtype=dtype, seed=2)
    assert_close(layer_norm(x, weight, bias, 1e-5), reference(x, weight, bias, 1e-5))
    normed, total = layer_norm_add(x, residual, weight, bias, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normed, reference(total, weight, bias, 1e-5))
