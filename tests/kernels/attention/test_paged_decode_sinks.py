"""Scores without a value in the softmax, in decode and in prefill."""

import pytest
import torch
from torch import Tensor

from kernels.attention.split_plan import plan_splits
from tests.kernels.attention import test_paged_decode, test_paged_prefill
from tests.kernels.attention.attention_cases import FP8, paged_case
from tests.kernels.support import DEVICE, assert_close, each_dtype, randn

LENGTHS = [0, 1, 16, 65, 300]
CHUNKS = [3, 40, 1, 17]


def _sinks(heads: int) -> Tensor:
    """Return scores far below those of keys, like them, and far above."""
    return torch.linspace(-60.0, 60.0, heads, device=DEVICE)


@each_dtype
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("num_items", [5, 40], ids=["whole", "split"])
def test_decode(num_items: int, soft_cap: float | None, dtype: torch.dtype) -> None:
    case, query = paged_case(LENGTHS, dtype=dtype), randn(len(LENGTHS), 6, 64, dtype=dtype) * 4
    plan = plan_splits(case.seq_lens, num_items, 2)
    options = {"soft_cap": soft_cap, "sinks": _sinks(6)}
    out = test_paged_decode.decode(query, case, plan, **options)
    assert_close(out, test_paged_decode.dense(query, case, **options))


@each_dtype
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_prefill(soft_cap: float | None, window: int | None, dtype: torch.dtype) -> None:
    case = test_paged_prefill.windowed(CHUNKS, [3, 90, 64, 17], window, dtype=dtype)
    query = randn(sum(CHUNKS), 6, 64, dtype=dtype) * 4
    options = {"soft_cap": soft_cap, "sinks": _sinks(6), "sliding_window": window}
    out = test_paged_prefill.prefill(query, case, CHUNKS, **options)
    assert_close(out, test_paged_prefill.dense(query, case, CHUNKS, **options))


def test_fp8_caches_have_scales_beside_them() -> None:
    case, query = paged_case([65, 17], dtype=FP8), randn(2, 6, 64)
    sinks = _sinks(6)
    expected = test_paged_decode.dense(query, case, sinks=sinks)
    for out in (
        test_paged_decode.decode(query, case, sinks=sinks),
        test_paged_prefill.prefill(query, case, [1, 1], sinks=sinks),
    ):
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


def test_sinks_that_do_not_fit_are_named() -> None:
    case, query = paged_case([65, 17]), randn(2, 6, 64)
    for sinks in (_sinks(5), _sinks(6).half()):
        with pytest.raises(ValueError, match="sinks: must"):
            test_paged_decode.decode(query, case, sinks=sinks)
        with pytest.raises(ValueError, match="sinks: must"):
            test_paged_prefill.prefill(query, case, [1, 1], sinks=sinks)
