import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rms_norm import reference, rms_norm, rms_norm_add
from tests.kernels.support import TOLERANCES, assert_close, padded, randn


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(2, 3000),
    st.sampled_from(list(TOLERANCES)),
    st.booleans(),
    st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_any_shape(
    rows: int, size: int, dtype: torch.dtype, unit_offset: bool, scale: float
) -> None:
    x, weight = padded(randn(rows, size, dtype=dtype) * scale), randn(size, dtype=dtype, seed=1)
    residual = randn(rows, size, dtype=dtype, seed=2)
    out = rms_norm(x, weight, 1e-6, unit_offset=unit_offset)
    assert_close(out, reference(x, weight, 1e-6, unit_offset=unit_offset))
    normed, total = rms_norm_add(x, residual, weight, 1e-6, unit_offset=unit_offset)
    assert torch.equal(total, x + residual)
    assert_close(normed, reference(total, weight, 1e-6, unit_offset=unit_offset))
