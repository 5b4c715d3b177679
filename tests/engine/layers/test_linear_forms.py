"""Packed and int8 projections against exact products."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.linear.int8 import (
    Int8Linear,
    multiplies_int8,
    quantize_channels,
    quantize_rows,
)
from engine.layers.linear.linear import Linear
from engine.layers.linear.onednn import OneDnnLinear, can_pack
from tests.factories.forms import FLOATS, rounding

CPU = torch.device("cpu")
SHAPES = [(1, 1), (7, 5), (33, 65), (100, 3), (64, 160), (896, 1152)]  # in, out
NUM_ROWS = [0, 1, 3, 64]
PACKABLE = [dtype for dtype in FLOATS if can_pack(dtype)]

needs_int8 = pytest.mark.skipif(not multiplies_int8(), reason="this CPU has no exact int8 products")


def operands(
    in_features: int, out_features: int, num_rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(in_features * 1000 + out_features + num_rows)
    normal = partial(torch.randn, generator=generator)
    x, weight, bias = (
        normal(num_rows, in_features),
        normal(out_features, in_features),
        normal(out_features),
    )
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_packed_products(
    dtype: torch.dtype, shape: tuple[int, int], num_rows: int, with_bias: bool
) -> None:
    x, weight, bias = operands(*shape, num_rows, dtype)
    given = bias if with_bias else None
    found = OneDnnLinear(weight, given)(x)
    assert found.dtype == dtype
    assert found.shape == (num_rows, shape[1])
    # Sums of in_features products in float32, in whatever order, and rounded at the end; before
    # the bias is added, too.
    sizes = exact(x.abs(), weight.abs(), None if given is None else given.abs())
    wanted = exact(x, weight, given)
    bound = (shape[0] + 1) * rounding(torch.float32) * sizes + 2 * rounding(dtype) * sizes
    assert ((found.double() - wanted).abs() <= bound).all()


@needs_int8
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int8_products(
    dtype: torch.dtype, shape: tuple[int, int], num_rows: int, with_bias: bool
) -> None:
    x, weight, bias = operands(*shape, num_rows, dtype)
    given = bias if with_bias else None
    found = Int8Linear(weight, given)(x)
    assert found.dtype == dtype
    assert found.shape == (num_rows, shape[1])
    # Either operand is off by half a step at most. A step is the largest of its row / 127, that of
    # the activations rounded to their type.
    weight_step = weight.double().abs().amax(1) / 127
    step = x.double().abs().amax(1, keepdim=True) / 127 * (1 + 2 * rounding(dtype))
    sum_x, sum_weight = x.double().abs().sum(1, keepdim=True), weight.double().abs().sum(1)
    off = (sum_x * weight_step + step * sum_weight + shape[0] * step * weight_step / 2) / 2
    wanted = exact(x, weight, given)
    # Rounded in the product, after the scale, and with the bias.
    sizes = wanted.abs() + off + (0 if given is None else given.double().abs())
    assert ((found.double() - wanted).abs() <= off * 1.0001 + 3 * rounding(dtype) * sizes).all()


@needs_int8
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int8_products_are_those_of_the_quantised_operands(dtype: torch.dtype) -> None:
    x, weight, bias = operands(300, 41, 5, dtype)
    steps, scale = quantize_rows(x)
    weight_scale = weight.float().abs().amax(1) / 127
    weight_steps = (weight.float() / weight_scale[:, None]).round()
    integers = (steps.double() - 128) @ weight_steps.double().t()
    assert integers.abs().max() > 2**15  # no sum of 16 bits would hold them
    wanted = integers * weight_scale.double() * scale.double() + bias.double()
    sizes = (wanted - bias.double()).abs() + bias.double().abs()
    off = (Int8Linear(weight, bias)(x).double() - wanted).abs()
    assert (off <= 3 * rounding(dtype) * sizes + 1e-6 * sizes).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_quantises_to_its_nearest_step(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    # Each as the largest of its row, with its opposite and with the middle between two steps.
    rows = torch.stack([values, -values, values * (10.5 / 127), torch.zeros_like(values)], 1)
    steps, scale = quantize_rows(rows)
    assert steps.dtype == torch.uint8
    normal = (rows[:, :1].abs() / 127 >= torch.finfo(dtype).tiny).squeeze()
    assert (steps[normal][:, :2].int() - 128).abs().eq(127).all()
    assert steps[:, 3].eq(128).all()
    assert scale.isfinite().all()
    off = ((steps.double() - 128) * scale.double() - rows.double()).abs()
    assert (off <= scale.double() * 0.5001).all()


@needs_int8
@pytest.mark.parametrize("size", [1e-4, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_small_rows_are_quantised_as_finely_as_large_ones(dtype: torch.dtype, size: float) -> None:
    x, weight, _ = operands(256, 41, 5, dtype)
    wanted = x.double() @ weight.double().t()
    found = Int8Linear(weight, None)((x.double() * size).to(dtype)).double() / size
    assert (found - wanted).norm() < 0.02 * wanted.norm()


@needs_int8
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_zeros_and_channels_of_zeros_are_zero(dtype: torch.dtype) -> None:
    x, weight, bias = operands(33, 5, 4, dtype)
    x[1] = 0
    weight[2] = 0
    found = Int8Linear(weight, bias)(x)
    assert torch.equal(found[1], bias)
    assert torch.equal(found[:, 2], bias[2].expand(4))
    assert found.isfinite().all()


@needs_int8
def test_rows_do_not_depend_on_each_other() -> None:
    x, weight, _ = operands(896, 1152, 64, torch.bfloat16)
    linear = Int8Linear(weight, None)
    alone = torch.cat([linear(row[None]) for row in x * 100])
    x[1:] *= 100
    assert torch.equal(linear(x)[1:], alone[1:])


def test_undefined_activations_stay_so() -> None:
    _, scale = quantize_rows(torch.tensor([[1.0, float("nan"), 2.0], [1.0, 2.0, 3.0]]))
    assert scale.isnan().squeeze().tolist() == [True, False]


@pytest.mark.parametrize("form", [OneDnnLinear, pytest.param(Int8Linear, marks=needs_int8)])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_stacked_parts_keep_their_places(
    form: Callable[[Tensor, Tensor | None], nn.Module], with_bias: bool
) -> None:
    sizes = {"q_proj": 12, "k_proj": 5, "v_proj": 3}
    linear = Linear(33, sizes, bias=with_bias, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(1)
    for tensor in linear.destinations().values():
        tensor.normal_(generator=generator)
    x = torch.randn(6, 33, generator=generator)
    parts = form(linear.weight, linear.bias)(x).split(list(sizes.values()), dim=-1)
    for name, part in zip(sizes, parts, strict=True):
        given = linear.destinations()
        alone = form(given[f"{name}.weight"].clone(), given.get(f"{name}.bias"))(x)
        torch.testing.assert_close(part, alone, rtol=1e-5, atol=1e-5)


def test_a_row_of_zeros_has_a_scale_whose_products_are_normal_numbers() -> None:
    """Denormal ones would be several times slower."""
    weight = torch.randn(3, 64)
    weight[1] = 0
    steps, scale = quantize_channels(weight)
    assert not steps[1].any()
    assert 1e-9 * scale.min() >= torch.finfo(torch.float32).tiny
