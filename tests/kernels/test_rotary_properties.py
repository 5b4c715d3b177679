from typing import Any

import pytest

from kernels import device
from kernels.attention.paged_cache import FP8
from kernels.rotary import rotary_and_cache
from tests.kernels.rotary_cases import arguments, check_slots, turned
from tests.kernels.support import TOLERANCES, assert_close

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, dim = draw(st.integers(1, 6)), 2 * draw(st.integers(1, 70))
    rotary = 2 * draw(st.integers(1, dim // 2))
    shape = draw(st.integers(1, 9)), kv_heads * draw(st.integers(1, 4)), kv_heads, dim, rotary
    dtype = draw(st.sampled_from(list(TOLERANCES)))
    cache_dtype = draw(st.sampled_from([dtype, FP8]))
    return arguments(
        shape,
        dtype,
        cache_dtype=cache_dtype,
        norms=draw(st.booleans()),
        scaled=draw(st.booleans()),
    )


@settings(max_examples=20, deadline=None)
@given(_cases(), st.booleans(), st.data())
def test_any_shape_is_rotated_and_cached(
    case: dict[str, Any], interleaved: bool, data: st.DataObject
) -> None:
    assert device.runs_triton(case["query"])
    slots = case["slot_mapping"]
    padding = data.draw(st.lists(st.integers(0, len(slots) - 1)))
    slots[padding] = -1
    out = rotary_and_cache(**case, interleaved=interleaved)
    assert_close(out, turned(case, "query", interleaved))
    real = slots >= 0
    for name in ("key", "value"):
        wide = turned(case, "key", interleaved) if name == "key" else case["value"].float()
        cache, tolerance = case[f"{name}_cache"], None
        if cache.dtype == FP8:
            wide = (wide / case[f"{name}_scale"][:, None]).clamp(-448, 448)
            tolerance = 0.04  # float8 has three mantissa bits
        check_slots(cache, slots[real], wide[real], tolerance)
