import pytest
import torch
import torch.nn.functional as F

from kernels import device
from kernels.layer_norm import layer_norm, layer_norm_add, reference
from tests.kernels.support import DEVICE, assert_close, each_dtype, padded, randn
from tests.kernels.vast_memory import vast_zeros

SHAPES = [(1, 2), (5, 63), (3, 2, 100), (41, 64), (2, 768), (1, 4097)]
each_bias = pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "none"])


@pytest.fixture(params=["triton", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test on the kernel and on the CPU implementations."""
    monkeypatch.setattr(device, "runs_triton", lambda _: request.param == "triton")
    return request.param


def _vectors(
    size: int, with_bias: bool, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return randn(size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=3) if with_bias else None


@each_bias
def test_the_reference_is_torchs_own(with_bias: bool) -> None:
    x, (weight, bias) = randn(5, 63) * 3 + 2, _vectors(63, with_bias)
    wide = None if bias is None else bias.double()
    expected = F.layer_norm(x.double(), (63,), weight.double(), wide, 1e-3)
    assert_close(reference(x, weight, bias, 1e-3), expected)


@each_dtype
@each_bias
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype) -> None:
    x = padded(randn(*shape, dtype=dtype) * 3 + 1)
    weight, bias = _vectors(shape[-1], with_bias, dtype)
    out = layer_norm(x, weight, bias, 1e-5)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_close(out, reference(x, weight, bias, 1e-5))


@each_dtype
@each_bias
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_addition(shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype) -> None:
    x, residual = padded(randn(*shape, dtype=dtype)), padded(randn(*shape, dtype=dtype, seed=2))
    weight, bias = _vectors(shape[-1], with_bias, dtype)
    before = x.clone(), residual.clone()
    normed, total = layer_norm_add(x, residual, weight, bias, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normed, reference(total, weight, bias, 1e-5))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_a_large_mean_does_not_cancel() -> None:
    x = randn(3, 100) + 1000
    ones = torch.ones(100, device=DEVICE)
    expected = F.layer_norm(x.double(), (100,), eps=1e-5)
    # The mean is rounded to a few 1e-5; E[x^2] - E[x]^2 would be off by 0.1 and more.
    assert_close(layer_norm(x, ones, None, 1e-5), expected, 2e-4)


def test_large_half_precision_values_do_not_overflow() -> None:
    x = torch.tensor([[60000.0, -60000.0]], dtype=torch.float16, device=DEVICE)
    ones = torch.ones(2, dtype=torch.float16, device=DEVICE)
    assert layer_norm(x, ones, None, 1e-6).tolist() == [[1, -1]]


def test_no_rows() -> None:
    x, weight = randn(0, 8), randn(8)
    normed, total = layer_norm_add(x, x, weight, weight, 1e-5)
    assert layer_norm(x, weight, None, 1e-5).shape == normed.shape == total.shape == (0, 8)


def test_addresses_beyond_two_to_the_31() -> None:
    memory = vast_zeros(2**32 + 2048).view(torch.float16)
    x = memory.as_strided((3, 1024), (2**30, 1)).copy_(randn(3, 1024))
    weight, bias = _vectors(1024, True, torch.float16)
    expected = reference(x, weight, bias, 1e-5)
    assert_close(layer_norm(x, weight, bias, 1e-5), expected)
    normed, _ = layer_norm_add(torch.zeros_like(x), x, weight, bias, 1e-5)
    assert_close(normed, expected)


def test_wrong_arguments_are_named() -> None:
    x, weight = randn(2, 8), randn(8)
    with pytest.raises(ValueError, match="x: must be"):
        layer_norm(x.int(), weight, None, 1e-5)
    with pytest.raises(ValueError, match="x: the last dimension must not be empty"):
        layer_norm(x[:, :0], weight[:0], None, 1e-5)
    with pytest.raises(ValueError, match="x: the last dimension must be contiguous"):
        layer_norm(x.t(), weight[:2], None, 1e-5)
    with pytest.raises(ValueError, match=r"weight: must have shape \[8\]"):
        layer_norm(x, weight[:4], None, 1e-5)
    with pytest.raises(ValueError, match=r"weight: must be torch\.float32"):
        layer_norm(x, weight.half(), None, 1e-5)
    with pytest.raises(ValueError, match=r"bias: must have shape \[8\]"):
        layer_norm(x, weight, weight[:4], 1e-5)
    with pytest.raises(ValueError, match="bias: must be on"):
        layer_norm(x, weight, weight.to("meta"), 1e-5)
    with pytest.raises(ValueError, match="bias: the last dimension must be contiguous"):
        layer_norm(x, weight, randn(16)[::2], 1e-5)
    with pytest.raises(ValueError, match="residual: must have shape"):
        layer_norm_add(x, x[:1], weight, None, 1e-5)
    with pytest.raises(ValueError, match=r"residual: must be torch\.float32"):
        layer_norm_add(x, x.half(), weight, None, 1e-5)
