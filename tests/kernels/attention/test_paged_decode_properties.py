import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention.split_plan import plan_splits
from tests.kernels.attention.attention_cases import FP8
from tests.kernels.attention.test_paged_decode import FP8_TOLERANCE, decode, dense, windowed
from tests.kernels.support import TOLERANCES, assert_close, randn


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_decode_is_dense_attention(data: st.DataObject) -> None:
    draw = data.draw
    lengths = draw(st.lists(st.integers(0, 200), min_size=1, max_size=4), "lengths")
    group, kv_heads = draw(st.integers(1, 9), "group"), draw(st.integers(1, 2), "kv_heads")
    head_dim = draw(st.sampled_from([32, 48, 64, 80, 128]), "head_dim")
    dtype = draw(st.sampled_from(list(TOLERANCES)), "dtype")
    fp8 = draw(st.booleans(), "fp8")
    window = draw(st.one_of(st.none(), st.integers(1, 250)), "window")
    soft_cap = draw(st.one_of(st.none(), st.floats(1, 60)), "soft_cap")
    case = windowed(
        lengths,
        window,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=draw(st.sampled_from([16, 32, 64]), "block_size"),
        dtype=FP8 if fp8 else dtype,
    )
    query = randn(len(lengths), group * kv_heads, head_dim, dtype=dtype, seed=3)
    num_items = len(lengths) + draw(st.integers(0, 8), "spare items")
    plan = plan_splits(case.seq_lens, num_items, kv_heads, sliding_window=window)
    out = decode(query, case, plan, soft_cap=soft_cap)
    expected = dense(query, case, sliding_window=window, soft_cap=soft_cap)
    tolerance = max(TOLERANCES[dtype], FP8_TOLERANCE) if fp8 else TOLERANCES[dtype]
    # The tanh is rounded near 1, then multiplied by the cap.
    assert_close(out, expected, max(tolerance, 1e-5 if soft_cap else 0))
