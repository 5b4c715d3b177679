import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.rotary import reference, rotary_and_cache
from tests.kernels.rotary_cases import (
    BLOCK_SIZE,
    Shape,
    arguments,
    check_slots,
    each_convention,
    each_shape,
    turned,
)
from tests.kernels.support import DEVICE, assert_close, each_dtype, randn, take_path

_CACHES = ("key_cache", "value_cache")


@pytest.fixture(params=["triton", "torch", "cpu"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test on the kernel and on the CPU implementations."""
    take_path(request.param, monkeypatch)
    return request.param


@each_convention
def test_the_reference_multiplies_complex_numbers(interleaved: bool) -> None:
    x, angles = randn(3, 2, 12), randn(3, 4, seed=1)
    rotated = reference(x, angles.cos(), angles.sin(), interleaved=interleaved)
    first, second = (x[..., 0:8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
    product = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    parts = (product.real, product.imag)
    pairs = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    assert_close(rotated, torch.cat((pairs, x[..., 8:]), -1))


@each_dtype
@each_convention
@pytest.mark.parametrize(
    ("norms", "scaled"),
    [(False, False), (True, False), (False, True)],
    ids=["plain", "norms", "scaled"],
)
@each_shape
def test_rotates_and_writes_only_the_slots(
    shape: Shape, norms: bool, scaled: bool, interleaved: bool, dtype: torch.dtype
) -> None:
    given = arguments(shape, dtype, norms=norms, scaled=scaled)
    originals = {name: torch.clone(given[name]) for name in ("query", "key", "value")}
    rotated = rotary_and_cache(**given, interleaved=interleaved)
    assert rotated.dtype == dtype
    assert rotated.is_contiguous()
    assert_close(rotated, turned(given, "query", interleaved))
    slots = given["slot_mapping"]
    expected = turned(given, "key", interleaved)
    check_slots(given["key_cache"], slots, expected)
    check_slots(given["value_cache"], slots, given["value"], 0.0)
    for name, original in originals.items():
        assert torch.equal(given[name], original), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norms_round_as_the_model_does(dtype: torch.dtype, path: str) -> None:
    if path == "triton" and device.INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes bfloat16 wrongly")
    given = arguments((6, 4, 2, 64, 64), dtype, norms=True)
    # Rotated by zero and by half a turn: exactly the norm's result.
    given["cos"], given["sin"] = (torch.ones(6, 32, device=DEVICE) for _ in range(2))
    given["sin"].zero_()
    given["cos"][3:] = -1
    wide = given["query"].float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)
    expected = given["query_norm"] * normed.to(dtype)
    expected[3:] *= -1
    different = rotary_and_cache(**given) != expected
    # Another summation order may round a value the other way; a missing rounding changes a third.
    assert different.float().mean() < 0.02


def test_padding_is_not_written() -> None:
    given = arguments((40, 6, 2, 16, 16))
    given["slot_mapping"][[0, 7, 8, 39]] = -1
    # The memory before the caches, where slot -1 would be, is checked too.
    before = {name: torch.cat((given[name][:1], given[name])) for name in _CACHES}
    given |= {name: cache[1:] for name, cache in before.items()}
    rotated = rotary_and_cache(**given)
    assert_close(rotated, turned(given, "query"))
    real = given["slot_mapping"] >= 0
    slots = given["slot_mapping"][real]
    check_slots(given["key_cache"], slots, turned(given, "key")[real])
    check_slots(given["value_cache"], slots, given["value"][real], 0.0)
    assert all((cache[0] == 7).all() for cache in before.values())


def test_only_padding_and_no_tokens() -> None:
    given = arguments((3, 2, 1, 8, 8))
    given["slot_mapping"].fill_(-1)
    rotary_and_cache(**given)
    nothing = {
        name: given[name][:0] for name in ("query", "key", "value", "cos", "sin", "slot_mapping")
    }
    assert rotary_and_cache(**{**given, **nothing}).shape == (0, 2, 8)
    assert (given["key_cache"] == 7).all()
    assert (given["value_cache"] == 7).all()


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query", _ones(5, 6, 10, dtype=torch.int64), "query: must be"),
        ("query", _ones(5, 10), r"query: must have shape \[any, any, any\]"),
        ("query", _ones(5, 6, 9), "query: the last dimension must be even"),
        ("query", _ones(5, 0, 10), "query: must have a dimension of heads"),
        ("query", _ones(5, 10, 6).mT, "query: .* side by side, each contiguous"),
        ("key", _ones(5, 0, 10), "key: must have a dimension of heads"),
        ("query", _ones(5, 12, 10)[:, ::2], "query: the heads of a token must lie side by side"),
        ("key", _ones(4, 2, 10), r"key: must have shape \[5, any, 10\]"),
        ("key", _ones(5, 2, 10).half(), r"key: must be torch\.float32"),
        ("key", _ones(5, 2, 20)[..., :10], "key: the heads of a token must lie side by side"),
        ("value", _ones(5, 3, 10), r"value: must have shape \[5, 2, 10\]"),
        ("value", _ones(5, 2, 10).to("meta"), "value: must be on"),
        ("cos", _ones(5, 6), "cos: must have 1 to 5 columns"),
        ("cos", _ones(5, 0), "cos: must have 1 to 5 columns"),
        ("cos", _ones(5, 10)[:, ::2], "cos: must be contiguous"),
        ("sin", _ones(5, 4), r"sin: must have shape \[5, 5\]"),
        ("sin", _ones(5, 5).half(), r"sin: must be torch\.float32"),
        ("query_scale", _ones(6), r"query_scale: must have shape \[5\]"),
        ("query_scale", _ones(5).half(), r"query_scale: must be torch\.float32"),
        ("query_scale", _ones(10)[::2], "query_scale: must be contiguous"),
        ("query_norm", _ones(9), r"query_norm: must have shape \[10\]"),
        ("query_norm", _ones(10).half(), r"query_norm: must be torch\.float32"),
        ("key_norm", _ones(20)[::2], "key_norm: must be contiguous"),
        ("key_cache", _ones(4, 3, 2, 4), "key_cache: must have shape"),
        ("key_cache", _ones(4, 3, 2, 10).bfloat16(), "key_cache: must be"),
        ("value_cache", _ones(2, 3, 2, 10), "value_cache: must have shape"),
        ("value_cache", _ones(4, 3, 2, 10).half(), r"value_cache: must be torch\.float32"),
        ("slot_mapping", _ones(5, dtype=torch.int32), r"slot_mapping: must be torch\.int64"),
        ("slot_mapping", _ones(6, dtype=torch.int64), "slot_mapping: must have shape"),
        ("slot_mapping", _ones(5, dtype=torch.int64).to("meta"), "slot_mapping: must be on"),
        ("slot_mapping", _ones(10, dtype=torch.int64)[::2], "slot_mapping: must be contiguous"),
        ("key_scale", _ones(2), "key_scale: is required with float8 caches"),
        ("value_scale", _ones(2), "value_scale: is required with float8 caches"),
    ],
)
def test_wrong_arguments_are_named(name: str, wrong: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_and_cache(**{**arguments(), name: wrong})


def test_a_cache_that_would_be_copied_is_refused() -> None:
    strided = _ones(BLOCK_SIZE, 2, 2, 10).transpose(0, 1)
    with pytest.raises(ValueError, match="value_cache: must be contiguous"):
        rotary_and_cache(**{**arguments(), "value_cache": strided})
