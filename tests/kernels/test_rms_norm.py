import pytest
import torch
import torch.nn.functional as F

from kernels.rms_norm import reference, rms_norm, rms_norm_add
from tests.kernels.support import DEVICE, assert_close, each_dtype, padded, randn, take_path
from tests.kernels.vast_memory import vast_zeros

# Several rows per program with a remainder; one row per program; the widest.
SHAPES = [(1, 1), (5, 63), (3, 7, 100), (2, 896), (1, 4097), (2, 20000)]


@pytest.fixture(params=["triton", "torch", "cpu"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test on the kernel and on the CPU implementations."""
    take_path(request.param, monkeypatch)
    return request.param


def test_the_reference_is_torchs_own() -> None:
    x, weight = randn(5, 63) * 3, randn(63, seed=1)
    assert_close(reference(x, weight, 1e-5), F.rms_norm(x, (63,), weight, 1e-5))
    gemma = reference(x, weight, 1e-5, unit_offset=True)
    assert_close(gemma, F.rms_norm(x, (63,), 1 + weight, 1e-5))


@each_dtype
@pytest.mark.parametrize("unit_offset", [False, True], ids=["weight", "1+weight"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(shape: tuple[int, ...], unit_offset: bool, dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype) * 3, randn(shape[-1], dtype=dtype, seed=1)
    out = rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
    assert out.dtype == dtype
    assert_close(out, reference(x, weight, 1e-5, unit_offset=unit_offset))


@each_dtype
@pytest.mark.parametrize("unit_offset", [False, True], ids=["weight", "1+weight"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_addition(shape: tuple[int, ...], unit_offset: bool, dtype: torch.dtype) -> None:
    x, residual = padded(randn(*shape, dtype=dtype)), padded(randn(*shape, dtype=dtype, seed=2))
    weight = randn(shape[-1], dtype=dtype, seed=1)
    before = x.clone(), residual.clone()
    normed, total = rms_norm_add(x, residual, weight, 1e-5, unit_offset=unit_offset)
    assert torch.equal(total, x + residual)
    assert_close(normed, reference(total, weight, 1e-5, unit_offset=unit_offset))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_large_half_precision_values_do_not_overflow() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16, device=DEVICE)
    ones = torch.ones(8, dtype=torch.float16, device=DEVICE)
    assert torch.equal(rms_norm(x, ones, 1e-6), torch.ones_like(x))


def test_rounds_before_the_weight_as_the_model_does() -> None:
    x, weight = randn(16, 256, dtype=torch.float16), randn(256, dtype=torch.float16, seed=1)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    # Another summation order may round a value the other way.
    different = rms_norm(x, weight, 1e-5) != weight * normed.half()
    assert different.float().mean() < 0.02
    gemma = rms_norm(x, weight, 1e-5, unit_offset=True)
    assert (gemma != (normed * (1 + weight.float())).half()).float().mean() < 0.02


def test_addresses_beyond_two_to_the_31() -> None:
    memory = vast_zeros(2**32 + 2048).view(torch.float16)
    x = memory.as_strided((3, 1024), (2**30, 1)).copy_(randn(3, 1024))
    weight = randn(1024, dtype=torch.float16, seed=1)
    assert_close(rms_norm(x, weight, 1e-5), reference(x, weight, 1e-5))
    normed, _ = rms_norm_add(torch.zeros_like(x), x, weight, 1e-5)
    assert_close(normed, reference(x, weight, 1e-5))


def test_no_rows() -> None:
    x, weight = randn(0, 8), randn(8)
    normed, total = rms_norm_add(x, x, weight, 1e-5)
    assert rms_norm(x, weight, 1e-5).shape == normed.shape == total.shape == (0, 8)


def test_wrong_arguments_are_named() -> None:
    x, weight = randn(2, 8), randn(8)
    with pytest.raises(ValueError, match="x: must be"):
        rms_norm(x.int(), weight, 1e-5)
    with pytest.raises(ValueError, match="x: the last dimension must not be empty"):
        rms_norm(x[:, :0], weight[:0], 1e-5)
    with pytest.raises(ValueError, match="x: the last dimension must be contiguous"):
        rms_norm(x.t(), weight[:2], 1e-5)
    with pytest.raises(ValueError, match=r"weight: must have shape \[8\]"):
        rms_norm(x, weight[:4], 1e-5)
    with pytest.raises(ValueError, match=r"weight: must be torch\.float32"):
        rms_norm(x, weight.half(), 1e-5)
    with pytest.raises(ValueError, match="weight: must be on"):
        rms_norm(x, weight.to("meta"), 1e-5)
    with pytest.raises(ValueError, match="residual: must have shape"):
        rms_norm_add(x, x[:1], weight, 1e-5)
