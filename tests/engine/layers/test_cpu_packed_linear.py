"""Projections with weights in panels against exact products."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear.cpu_packed import CpuPackedLinear
from kernels import gated_activation
from kernels.cpu import linear as kernels
from kernels.cpu.activation import Activation
from tests.factories.forms import runs_panels

pytestmark = pytest.mark.skipif(
    not runs_panels(torch.bfloat16),
    reason="this CPU has no products of ours, or the kernels are not built",
)

SHAPES = [(4, 1), (8, 31), (36, 33), (160, 64), (896, 1152), (4864, 96)]  # in, out
# None; less than, as many as and more than are multiplied at once, with AVX2 (6) and AVX-512 (12);
# more than one task has.
NUM_ROWS = [0, 1, 6, 7, 12, 13, 701, *(pytest.param(n, marks=pytest.mark.large) for n in (3, 40))]
BFLOAT16 = torch.finfo(torch.bfloat16).eps / 2
FLOAT32 = torch.finfo(torch.float32).eps / 2


each_kind = pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str
)


def operands(
    in_features: int, out_features: int, num_rows: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, whose rows lie apart with NaN between them, weight and bias."""
    generator = torch.Generator().manual_seed(in_features * 1000 + out_features + num_rows)
    normal = partial(torch.randn, generator=generator)
    x = torch.full((num_rows, in_features + 6), torch.nan)
    x[:, :in_features] = normal(num_rows, in_features)
    weight, bias = normal(out_features, in_features), normal(out_features)
    return x.to(dtype)[:, :in_features], weight.to(dtype), bias.to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.usefixtures("threads")
@each_dtype
@pytest.mark.parametrize("wide", [False, True], ids=["rounded", "wide"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(
    shape: tuple[int, int], num_rows: int, with_bias: bool, wide: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = operands(*shape, num_rows, dtype)
    given = bias if with_bias else None
    found = CpuPackedLinear(weight, given, wide=wide)(x)
    assert found.dtype == (torch.float32 if wide else dtype)
    assert found.shape == (num_rows, shape[1])
    sizes = exact(x.abs(), weight.abs(), None if given is None else given.abs())
    wanted = exact(x, weight, given)
    rounded = torch.finfo(found.dtype).eps / 2 * wanted.abs()
    bound = (shape[0] + 2) * FLOAT32 * sizes * (1 + BFLOAT16) + rounded
    assert ((found.double() - wanted).abs() <= bound).all()


@pytest.mark.usefixtures("threads")
@each_dtype
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_products_are_those_of_the_quantised_operands(
    shape: tuple[int, int], num_rows: int, with_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = operands(*shape, num_rows, dtype)
    found = CpuPackedLinear(weight, bias if with_bias else None, int8=True)(x)
    assert found.dtype == dtype
    assert found.shape == (num_rows, shape[1])
    step, weight_step = (t.float().abs().amax(1, keepdim=True) / 127 for t in (x, weight))
    # As the kernel does: one division for a row, halves to the even side.
    largest = x.float().abs().amax(1, keepdim=True)
    steps = (x.float() * torch.full_like(largest, 127).div(largest)).round()
    weight_steps = (weight.float() / weight_step).round()
    integers = steps.double() @ weight_steps.double().t()
    wanted = integers * step.double() * weight_step.double().t()
    sizes = wanted.abs() + bias.double().abs()
    if with_bias:
        wanted = wanted + bias.double()
    off = (found.double() - wanted).abs()
    assert (off <= torch.finfo(dtype).eps / 2 * wanted.abs() + 4 * FLOAT32 * sizes).all()


def test_sums_beyond_16_bits_are_exact() -> None:
    size = 4864
    weight = torch.full((33, size), -1.0).bfloat16()
    for sign in (1.0, -1.0):
        found = CpuPackedLinear(weight, None, int8=True)(torch.full((13, size), sign).bfloat16())
        assert torch.equal(found, torch.full((13, 33), -sign * size).bfloat16())


def test_rows_and_channels_of_zeros_are_zero() -> None:
    x, weight, bias = operands(36, 5, 4)
    x[1] = 0
    weight[2] = 0
    found = CpuPackedLinear(weight, bias, int8=True)(x)
    assert torch.equal(found[1], bias)
    assert torch.equal(found[:, 2], bias[2].expand(4))


@each_kind
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_stays_so_in_its_row_alone(int8: bool, value: float) -> None:
    x, weight, bias = operands(36, 33, 14)
    linear = CpuPackedLinear(weight, bias, int8=int8)
    x[3, 7] = value
    found = linear(x)
    assert not found[3].isfinite().any()
    x[3] = 1
    others = torch.arange(14) != 3
    assert torch.equal(found[others], linear(x)[others])


@pytest.mark.usefixtures("threads")
@each_kind
@each_dtype
@pytest.mark.parametrize("activation", [None, "silu"])
def test_rows_do_not_depend_on_each_other(
    int8: bool, dtype: torch.dtype, activation: Activation | None
) -> None:
    x, weight, bias = operands(896, 96, 64, dtype)
    x[1:] *= 100
    linear = CpuPackedLinear(weight, bias, int8=int8, activation=activation)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in (*range(1, 28), 64):  # groups of all sizes
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])


@pytest.mark.usefixtures("threads")
@each_kind
@each_dtype
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("num_rows", [0, 1, 14])
def test_gates(
    num_rows: int, activation: Activation, with_bias: bool, dtype: torch.dtype, int8: bool
) -> None:
    x, weight, bias = operands(160, 2 * 48, num_rows, dtype)
    given = bias if with_bias else None
    found = CpuPackedLinear(weight, given, int8=int8, activation=activation)(x)
    assert found.dtype == dtype
    product = CpuPackedLinear(weight, given, int8=int8, wide=True)(x)
    wanted = gated_activation.reference(product, activation)
    rounding = torch.finfo(dtype).eps / 2 + 4 * FLOAT32
    torch.testing.assert_close(found.float(), wanted, rtol=rounding * 1.01, atol=1e-5)


def test_dimensions_in_front_are_kept() -> None:
    x, weight, bias = operands(36, 33, 6)
    linear = CpuPackedLinear(weight, bias)
    assert torch.equal(linear(x.reshape(2, 3, 36)), linear(x).reshape(2, 3, 33))
    assert torch.equal(linear(x[0]), linear(x)[0])


def test_wrong_arguments_are_named() -> None:
    x, weight, bias = operands(36, 33, 2)
    packed = kernels.pack(weight)
    linear = partial(kernels.linear, out_features=33)
    with pytest.raises(ValueError, match=r"^weight: must be torch.float16"):
        linear(x.half(), packed, bias)
    with pytest.raises(ValueError, match=r"^weight: must be torch.float32"):
        linear(x.float(), packed, bias)
    # By the channels of a panel, which are those of two registers of AVX2 or of AVX-512.
    weight_shape, channels, half = {
        16: (r"\[3, 16, 16, 2\]", 48, 8),
        32: (r"\[2, 16, 32, 2\]", 64, 16),
    }[kernels.packed_columns()]
    with pytest.raises(ValueError, match=rf"^weight: must have shape {weight_shape}"):
        linear(x[:, :32], packed, bias)
    with pytest.raises(ValueError, match=r"^bias: must have shape \[33\]"):
        linear(x, packed, bias[:3])
    with pytest.raises(ValueError, match=r"^weight: must be on cpu"):
        linear(x, packed.to("meta"), bias)
    with pytest.raises(ValueError, match=r"^x: the last dimension must be contiguous"):
        linear(x.t().contiguous().t(), packed, bias)
    with pytest.raises(ValueError, match=rf"^scale: must have shape \[{channels}\]"):
        linear(x, kernels.pack_int8(weight.to(torch.int8)), bias, scale=torch.ones(33))
    with pytest.raises(ValueError, match=r"^weight: must be torch.uint8"):
        linear(x, packed, bias, scale=torch.ones(64))
    with pytest.raises(ValueError, match=rf"^size: must be a multiple of {half} \(got 17\)"):
        kernels.gated_linear(x, packed, None, size=17, activation="silu")


def test_rows_may_lie_anywhere_in_memory() -> None:
    x, weight, bias = operands(36, 33, 5)
    odd = torch.zeros(5, 37, dtype=torch.bfloat16)
    odd[:, 1:] = x
    linear = CpuPackedLinear(weight, bias)
    assert torch.equal(linear(odd[:, 1:]), linear(x.contiguous()))
