from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import device
from tests.kernels.attention.attention_cases import FP8
from tests.kernels.attention.test_paged_prefill import FP8_TOLERANCE, dense, prefill, windowed
from tests.kernels.support import DEVICE, TOLERANCES, assert_close, randn

_SETTINGS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}
_LIMITS = device.limits(DEVICE)
# Few SMs are occupied by few tiles: large tiles are chosen.
_GPUS = [_LIMITS, replace(_LIMITS, num_sms=1)]
_DTYPES = st.sampled_from(list(TOLERANCES))


@settings(max_examples=15, **_SETTINGS)
@given(data=st.data())
def test_prefill_is_dense_attention(data: st.DataObject) -> None:
    draw = data.draw
    pairs = st.tuples(st.integers(0, 60), st.integers(0, 100))
    sequences = draw(st.lists(pairs, min_size=1, max_size=4), "chunks and prefixes")
    chunks = [chunk for chunk, _ in sequences]
    lengths = [chunk + prefix for chunk, prefix in sequences]
    group, kv_heads = draw(st.integers(1, 9), "group"), draw(st.integers(1, 2), "kv_heads")
    head_dim = draw(st.sampled_from([32, 48, 64, 80, 128]), "head_dim")
    dtype, fp8 = draw(_DTYPES, "dtype"), draw(st.booleans(), "fp8")
    window = draw(st.one_of(st.none(), st.integers(1, 150)), "window")
    soft_cap = draw(st.one_of(st.none(), st.floats(1, 60)), "soft_cap")
    case = windowed(
        chunks,
        lengths,
        window,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=draw(st.sampled_from([16, 32, 64]), "block_size"),
        dtype=FP8 if fp8 else dtype,
        spare_columns=0,
    )
    padding = draw(st.integers(0, 3), "padding")
    query = randn(sum(chunks) + padding, group * kv_heads, head_dim, dtype=dtype, seed=3)
    with patch.object(device, "limits", return_value=draw(st.sampled_from(_GPUS), "GPU")):
        out = prefill(query, case, chunks, sliding_window=window, soft_cap=soft_cap)
    if sum(chunks):
        expected = dense(query, case, chunks, sliding_window=window, soft_cap=soft_cap)
        tolerance = FP8_TOLERANCE[dtype] if fp8 else TOLERANCES[dtype]
        # The tanh is rounded near 1, then multiplied by the cap.
        assert_close(out[: sum(chunks)], expected, max(tolerance, 1e-5 if soft_cap else 0))


@settings(max_examples=8, **_SETTINGS)
@given(data=st.data())
def test_a_prompt_may_come_in_any_chunks(data: st.DataObject) -> None:
    draw = data.draw
    length = draw(st.integers(2, 150), "length")
    ends = [*sorted(draw(st.sets(st.integers(1, length - 1), max_size=3), "ends")), length]
    window = draw(st.one_of(st.none(), st.integers(1, 100)), "window")
    case = windowed([length], [length], window, dtype=torch.float16)
    query = randn(length, 6, 64, dtype=torch.float16)
    with patch.object(device, "limits", return_value=draw(st.sampled_from(_GPUS), "GPU")):
        whole = prefill(query, case, [length], sliding_window=window)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            so_far = replace(case, seq_lens=torch.full_like(case.seq_lens, end))
            part = prefill(query[start:end], so_far, [end - start], sliding_window=window)
            assert_close(part, whole[start:end])
