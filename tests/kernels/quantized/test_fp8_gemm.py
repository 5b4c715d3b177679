import pytest
import torch
from torch import Tensor

from kernels.e4m3 import FP8
from kernels.quantized.fp8_gemm import GROUP, fp8_linear, reference
from kernels.quantized.rows import quantize_rows
from kernels.quantized.splits import plan_splits
from tests.kernels.support import DEVICE, TOLERANCES, assert_close, randn

# Rows, columns, depth: less than a tile, several tiles, splits of the depth, whose last is short.
SHAPES = [(1, 1, 16), (3, 40, 200), (17, 70, 1100), (129, 144, 144)]
each_dtype = pytest.mark.parametrize(
    "dtype", [dtype for dtype in TOLERANCES if dtype != torch.float32], ids=str
)
# Rows of the weight that share a scale of 128 inputs; None: each row has one scale.
each_scale = pytest.mark.parametrize("block", [None, 1, 64], ids=str)


def operands(
    rows: int, columns: int, depth: int, block: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return activations and weight in FP8, each with scales of very different sizes."""
    x, weight = randn(rows, depth).to(FP8), (100 * randn(columns, depth, seed=1)).to(FP8)
    scales = 1 if block is None else -(-depth // GROUP)
    if block is None or columns % block:
        block = 1
    x_scale, weight_scale = (
        torch.exp(2 * randn(count, scales, seed=seed)) / 100
        for seed, count in ((2, rows), (3, columns // block))
    )
    return x, x_scale, weight, weight_scale


def test_the_reference_is_the_product_of_what_the_codes_stand_for() -> None:
    x, x_scale, weight, weight_scale = operands(5, 128, 256, 64)
    wide_x, wide_weight = x.double(), weight.double()
    for i in range(2):
        part = slice(128 * i, 128 * (i + 1))
        wide_x[:, part] *= x_scale[:, i : i + 1]
        for row in range(128):
            wide_weight[row, part] *= weight_scale[row // 64, i]
    expected = wide_x @ wide_weight.t()
    assert_close(reference(x, x_scale, weight, weight_scale, None), expected)


@pytest.mark.usefixtures("path")
@each_dtype
@each_scale
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int, int], block: int | None, dtype: torch.dtype) -> None:
    tensors = operands(*shape, block)
    bias = randn(shape[1], dtype=dtype, seed=4) if block != 1 else None
    out = fp8_linear(*tensors, bias, dtype)
    assert out.dtype == dtype
    assert_close(out, reference(*tensors, bias))
    if shape[0] == 17:
        assert_close(fp8_linear(*tensors, bias, dtype, invariant=True), reference(*tensors, bias))


def test_quantised_operands_are_close_to_floats() -> None:
    x, weight = randn(9, 512), randn(40, 512, seed=1)
    (a, a_scale), (b, b_scale) = quantize_rows(x), quantize_rows(weight)
    out = fp8_linear(a, a_scale[:, None], b, b_scale[:, None], None, torch.float16)
    assert_close(out, x @ weight.t(), 0.05)


@each_scale
def test_a_row_gets_the_same_bits_whatever_rows_there_are(block: int | None) -> None:
    x, x_scale, weight, weight_scale = operands(70, 64, 264, block)

    def product(rows: slice, *, invariant: bool) -> Tensor:
        one = x[rows].contiguous(), x_scale[rows].contiguous()
        return fp8_linear(*one, weight, weight_scale, None, torch.float16, invariant=invariant)

    together = product(slice(0, 70), invariant=True)
    for rows in (slice(0, 1), slice(20, 37), slice(5, 70)):
        assert torch.equal(product(rows, invariant=True), together[rows])
    # Of up to 16 rows, always: sums of parts have a fixed order.
    few = product(slice(3, 19), invariant=False)
    assert torch.equal(product(slice(4, 5), invariant=False), few[1:2])


def test_a_value_that_is_not_finite_stays_in_its_row() -> None:
    x, x_scale, weight, weight_scale = operands(5, 40, 1100, None)
    x_scale[2] = torch.nan
    found = fp8_linear(x, x_scale, weight, weight_scale, None, torch.float16).isnan()
    assert found[2].all()
    assert found.sum() == 40


@pytest.mark.parametrize("num_tiles", [1, 7, 64, 500])
@pytest.mark.parametrize("num_blocks", [1, 7, 32, 112])
def test_parts_are_all_of_the_depth(num_tiles: int, num_blocks: int) -> None:
    splits = plan_splits(num_tiles, num_blocks, 132)
    assert (
        (splits.num_parts - 1) * splits.num_blocks
        < num_blocks
        <= splits.num_parts * splits.num_blocks
    )
    assert splits.num_parts == 1 or splits.num_parts * num_tiles <= 2 * 132
    assert splits.num_parts == 1 or splits.num_blocks >= 4


@pytest.mark.usefixtures("path")
def test_no_rows() -> None:
    tensors = operands(0, 5, 1024, None)
    assert fp8_linear(*tensors, None, torch.float16).shape == (0, 5)


def test_wrong_arguments_are_named() -> None:
    x, x_scale, weight, weight_scale = operands(3, 6, 256, None)
    half = torch.float16

    def expect(
        message: str, *args: Tensor, bias: Tensor | None = None, dtype: torch.dtype = half
    ) -> None:
        with pytest.raises(ValueError, match=message):
            fp8_linear(*args, bias, dtype)

    expect("x: must have shape", x[0], x_scale, weight, weight_scale)
    expect("x: must be", x.half(), x_scale, weight, weight_scale)
    expect("weight: must have shape", x, x_scale, weight[:, :128], weight_scale)
    expect("weight: must be", x, x_scale, weight.half(), weight_scale)
    expect("weight: must not be empty", x, x_scale, weight[:0], weight_scale[:0])
    expect("weight_scale: must have one scale", x, x_scale, weight, weight_scale.expand(6, 3))
    expect("weight_scale: its number of rows must divide", x, x_scale, weight, weight_scale[:4])
    expect("x_scale: must have shape", x, x_scale[:2], weight, weight_scale)
    expect("x_scale: must be", x, x_scale.half(), weight, weight_scale)
    expect("dtype: must be", x, x_scale, weight, weight_scale, dtype=torch.float32)
    expect("bias: must have shape", x, x_scale, weight, weight_scale, bias=randn(5, dtype=half))
    expect("bias: must be", x, x_scale, weight, weight_scale, bias=randn(6))
    elsewhere = x_scale.to("meta" if DEVICE.type == "cpu" else "cpu")
    expect("x_scale: must be on", x, elsewhere, weight, weight_scale)
