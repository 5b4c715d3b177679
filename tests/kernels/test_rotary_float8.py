import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.attention.paged_cache import FP8
from kernels.rotary import rotary_and_cache
from tests.kernels.rotary_cases import (
    BLOCK_SIZE,
    Shape,
    arguments,
    check_slots,
    each_convention,
    each_shape,
    stored,
    turned,
)
from tests.kernels.support import DEVICE, assert_close, each_dtype, randn
from tests.kernels.vast_memory import vast_zeros


@pytest.fixture(params=["triton", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test on the kernel and on the CPU implementations."""
    monkeypatch.setattr(device, "runs_triton", lambda _: request.param == "triton")
    return request.param


def _e4m3_values() -> Tensor:
    """Return the finite values of float8 e4m3 from 0 up, by definition; even indices are the values
    whose last bit is 0.
    """
    small = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return torch.tensor((small + normal)[:-1], dtype=torch.float64)


def _nearest(x: Tensor) -> Tensor:
    """Return `x` rounded to float8 e4m3 (nearest even, saturated), by a search among its values."""
    values = _e4m3_values()
    size = x.double().abs().cpu().clamp(max=448)
    above = torch.searchsorted(values, size).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    up, down = values[above] - size, size - values[below]
    index = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return torch.copysign(values[index], x.double().cpu()).to(DEVICE)


@each_dtype
@each_convention
@each_shape
def test_float8_cache(shape: Shape, interleaved: bool, dtype: torch.dtype) -> None:
    given = arguments(shape, dtype, cache_dtype=FP8, norms=True)
    assert_close(
        rotary_and_cache(**given, interleaved=interleaved),
        turned(given, "query", interleaved),
    )
    slots = given["slot_mapping"]
    keys = turned(given, "key", interleaved) / given["key_scale"][:, None]
    values = given["value"].float() / given["value_scale"][:, None]
    for cache, expected in ((given["key_cache"], keys), (given["value_cache"], values)):
        # Rounding of the norm may move a key by one float8 step, an eighth: a few, in bfloat16.
        check_slots(cache, slots, _nearest(expected), 0.03 if dtype == torch.bfloat16 else 0.01)


def test_float8_saturates_and_rounds_to_nearest_even(monkeypatch: pytest.MonkeyPatch) -> None:
    values = _e4m3_values()
    x = torch.cat((values, (values[1:] + values[:-1]) / 2, torch.tensor([464.0, 480.0, 1e30])))
    x = x.float()
    x = torch.cat((x, torch.nextafter(x, x + 1), torch.nextafter(x, x - 1)))
    x = torch.cat((x, -x, randn(400).cpu() * 100)).view(-1, 1, 8).to(DEVICE)
    for capability in ((8, 0), (9, 0)):
        if DEVICE.type == "cuda" and capability > torch.cuda.get_device_capability():
            continue
        limits = device.DeviceLimits(num_sms=1, shared_memory=0, capability=capability)
        monkeypatch.setattr(device, "limits", lambda _, limits=limits: limits)
        given = arguments((len(x), 1, 1, 8, 8), cache_dtype=FP8)
        given["key_scale"].fill_(0.25)  # a power of two: the division is exact
        given["value_scale"].fill_(0.25)
        given |= {"value": x / 4, "key": x / 4}
        given["cos"].fill_(1)
        given["sin"].fill_(0)
        rotary_and_cache(**given)
        for cache in (given["key_cache"], given["value_cache"]):
            assert torch.equal(stored(cache, given["slot_mapping"]).double(), _nearest(x))


def test_float8_keeps_nan() -> None:
    given = arguments((2, 2, 1, 8, 8), cache_dtype=FP8)
    given["value"][0, 0, 3] = float("nan")
    rotary_and_cache(**given)
    values = stored(given["value_cache"], given["slot_mapping"]).float()
    assert values.isnan().nonzero().tolist() == [[0, 0, 3]]


def test_addresses_beyond_two_to_the_31() -> None:
    given = arguments((3, 2, 1, 64, 64), torch.float16, cache_dtype=FP8)
    memory = vast_zeros(2**32 + 2 * 4 * 64).view(torch.float16)
    tokens = memory.as_strided((3, 4, 64), (2**30, 64, 1))
    for name, part in zip(("query", "key", "value"), tokens.split([2, 1, 1], dim=1), strict=True):
        given[name] = part.copy_(given[name])
    for name in ("key_cache", "value_cache"):
        memory = vast_zeros(2**31 + BLOCK_SIZE * 64)
        given[name] = memory.view(-1, BLOCK_SIZE, 1, 64).view(FP8)
    slots = given["slot_mapping"] = torch.tensor([2**25 + 9, 0, 2**25 - 1], device=DEVICE)
    assert_close(rotary_and_cache(**given), turned(given, "query"))
    for name, wide in (("key", turned(given, "key")), ("value", given["value"].float())):
        expected = _nearest(wide / given[f"{name}_scale"])
        assert_close(stored(given[f"{name}_cache"], slots), expected, 0.01)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("key_scale", None, "key_scale: is required with float8 caches"),
        ("value_scale", None, "value_scale: is required with float8 caches"),
        ("key_scale", torch.ones(3, device=DEVICE), r"key_scale: must have shape \[2\]"),
        (
            "value_scale",
            torch.ones(2, device=DEVICE).half(),
            r"value_scale: must be torch\.float32",
        ),
        ("value_scale", torch.ones(4, device=DEVICE)[::2], "value_scale: must be contiguous"),
        (
            "value_cache",
            torch.ones(2, BLOCK_SIZE, 2, 10, device=DEVICE),
            r"value_cache: must be torch\.float8_e4m3fn",
        ),
    ],
)
def test_wrong_float8_arguments_are_named(name: str, wrong: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_and_cache(**{**arguments(cache_dtype=FP8), name: wrong})
