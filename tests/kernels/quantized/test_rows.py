import pytest
import torch

from kernels.e4m3 import FP8
from kernels.quantized.rows import quantize_rows, reference
from tests.kernels.support import DEVICE, each_dtype, padded, randn

pytestmark = pytest.mark.usefixtures("path")


@each_dtype
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 128), (33, 100), (5, 2100)], ids=str)
def test_codes_and_scales(shape: tuple[int, int], is_static: bool, dtype: torch.dtype) -> None:
    x = padded(randn(*shape, dtype=dtype))
    scale = torch.tensor([0.003], device=DEVICE) if is_static else None
    codes, scales = quantize_rows(x, scale)
    expected, expected_scales = reference(x, scale)
    assert codes.dtype == FP8
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


def test_the_largest_value_of_a_row_is_exact() -> None:
    """And each other one is within half a step of its 3 bits of fraction, or of the smallest."""
    x = randn(7, 300)
    codes, scales = quantize_rows(x)
    found = codes.float() * scales[:, None]
    torch.testing.assert_close(found.abs().amax(1), x.abs().amax(1))
    bound = torch.maximum(x.abs() / 2**4, 2.0**-10 * scales[:, None])
    assert ((found - x).abs() <= 1.0001 * bound).all()


def test_values_beyond_a_static_scale_saturate() -> None:
    x = torch.tensor([[1000.0, -1000.0, 2.0, 0.0]], device=DEVICE)
    codes, _ = quantize_rows(x, torch.tensor([1.0], device=DEVICE))
    assert codes.float().tolist() == [[448.0, -448.0, 2.0, 0.0]]


def test_rows_of_zeros_and_of_what_is_not_finite() -> None:
    x = randn(5, 40)
    x[1] = 0
    x[2, 5] = x[4] = torch.nan
    codes, scales = quantize_rows(x)
    assert (codes[1].float() == 0).all()
    assert codes.float()[2].isnan().any()
    assert codes.float()[4].isnan().all()
    assert (codes.float() * scales[:, None])[[0, 3]].isfinite().all()


def test_no_rows() -> None:
    codes, scales = quantize_rows(randn(0, 8))
    assert codes.shape == (0, 8)
    assert scales.shape == (0,)


def test_wrong_arguments_are_named() -> None:
    x, scale = randn(2, 8), torch.ones(1, device=DEVICE)
    with pytest.raises(ValueError, match="x: must be"):
        quantize_rows(x.int())
    with pytest.raises(ValueError, match="x: must have shape"):
        quantize_rows(x[0])
    with pytest.raises(ValueError, match="x: rows must not be empty"):
        quantize_rows(x[:, :0])
    with pytest.raises(ValueError, match="x: the last dimension must be contiguous"):
        quantize_rows(x.t())
    with pytest.raises(ValueError, match="scale: must have shape"):
        quantize_rows(x, scale.expand(2))
    with pytest.raises(ValueError, match="scale: must be"):
        quantize_rows(x, scale.half())
    with pytest.raises(ValueError, match="scale: must be on"):
        quantize_rows(x, scale.to("meta"))
