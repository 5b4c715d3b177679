import pytest
import torch

from kernels.cpu.activation import Activation
from kernels.gated_activation import gated_activation
from kernels.quantized.gated_rows import gated_rows
from kernels.quantized.rows import quantize_rows
from tests.kernels.support import DEVICE, TOLERANCES, padded, randn

each_dtype = pytest.mark.parametrize(
    "dtype", [dtype for dtype in TOLERANCES if dtype != torch.float32], ids=str
)


pytestmark = pytest.mark.usefixtures("path")


@each_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("size", "group", "is_static"),
    [(1, None, False), (300, None, False), (300, None, True), (384, 128, False), (64, 16, False)],
)
def test_codes_are_those_of_the_activation(
    size: int, group: int | None, is_static: bool, activation: Activation, dtype: torch.dtype
) -> None:
    gate_up = padded(randn(5, 2 * size, dtype=dtype))
    scale = torch.tensor([0.01], device=DEVICE) if is_static else None
    codes, scales = gated_rows(gate_up, activation, group=group, scale=scale)
    product = gated_activation(gate_up, activation)
    expected, of_rows = quantize_rows(product.view(-1, group or size), scale)
    assert torch.equal(scales.flatten(), of_rows)
    assert codes.shape == product.shape
    assert torch.equal(codes.view(torch.uint8).flatten(), expected.view(torch.uint8).flatten())


def test_what_is_not_finite_stays_in_its_row() -> None:
    gate_up = randn(4, 80, dtype=torch.float16)
    gate_up[1, 3] = gate_up[2] = torch.nan
    codes, scales = gated_rows(gate_up, "silu", group=None)
    assert codes.float().isnan().any(1).tolist() == [False, True, True, False]
    assert scales[[0, 3]].isfinite().all()


def test_no_rows() -> None:
    codes, scales = gated_rows(randn(0, 512, dtype=torch.float16), "silu", group=128)
    assert codes.shape == (0, 256)
    assert scales.shape == (0, 2)


def test_wrong_arguments_are_named() -> None:
    x = randn(2, 80, dtype=torch.float16)
    scale = torch.ones(1, device=DEVICE)
    with pytest.raises(ValueError, match="activation: must be one of"):
        gated_rows(x, "relu", group=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gate_up: must be"):
        gated_rows(x.float(), "silu", group=None)
    with pytest.raises(ValueError, match="gate_up: must have shape"):
        gated_rows(x[0], "silu", group=None)
    with pytest.raises(ValueError, match="gate_up: rows must be even"):
        gated_rows(x[:, :7], "silu", group=None)
    with pytest.raises(ValueError, match="gate_up: the last dimension must be contiguous"):
        gated_rows(x.t(), "silu", group=None)
    with pytest.raises(ValueError, match="group: must be a power of 2"):
        gated_rows(x, "silu", group=16)
    with pytest.raises(ValueError, match="scale: must have shape"):
        gated_rows(x, "silu", group=None, scale=scale.expand(2))
    with pytest.raises(ValueError, match="scale: must be"):
        gated_rows(x, "silu", group=None, scale=scale.half())
