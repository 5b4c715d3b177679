"""Products with integers that have a scale and an offset for each group of inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.layers.integer_weight import (
    GroupedWeight,
    Int8Weight,
    IntegerKind,
    common_kind,
    round_to_8_bits,
    stack,
)
from engine.layers.linear.cpu_packed import CpuPackedLinear
from kernels import gated_activation
from kernels.cpu import linear as kernels
from kernels.cpu.activation import Activation
from tests.factories.forms import runs_panels

pytestmark = pytest.mark.skipif(
    not runs_panels(torch.bfloat16),
    reason="this CPU has no products of ours, or the kernels are not built",
)

# Inputs, outputs, and inputs of a group.
SHAPES = [(32, 1, 32), (64, 33, 32), (96, 31, 96), (256, 64, 64), (896, 1152, 128)]
NUM_ROWS = [0, 1, 6, 7, 12, 13, 701, *(pytest.param(n, marks=pytest.mark.large) for n in (3, 40))]
FLOAT32 = torch.finfo(torch.float32).eps / 2

each_size = pytest.mark.parametrize("bits", [4, 8])
with_offsets_and_without = pytest.mark.parametrize("has_offset", [True, False])
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str
)


def operands(
    shape: tuple[int, int, int],
    num_rows: int,
    bits: int,
    dtype: torch.dtype,
    *,
    has_offset: bool = True,
) -> tuple[Tensor, GroupedWeight, Tensor]:
    """Return x, weight and bias."""
    in_features, out_features, group_size = shape
    draw = torch.Generator().manual_seed(sum(shape) + num_rows)
    groups = (out_features, in_features // group_size)
    steps = torch.randint(0, 2**bits, (out_features, in_features), generator=draw)
    scale = (torch.rand(groups, generator=draw) + 0.1).half().float()
    offset = (-scale * torch.randint(0, 2**bits, groups, generator=draw)).half().float()
    x = torch.randn(num_rows, in_features, generator=draw).to(dtype)
    bias = torch.randn(out_features, generator=draw).to(dtype)
    given = offset if has_offset else None
    return x, GroupedWeight(steps.to(torch.uint8), scale, given, bits), bias


def dequantized(weight: GroupedWeight) -> Tensor:
    _, scale, offset, _ = weight.with_offset()
    assert offset is not None
    scale, offset = (
        each.double().repeat_interleave(weight.group_size, 1) for each in (scale, offset)
    )
    return weight.steps.double() * scale + offset


def quantized(x: Tensor) -> Tensor:
    """Return what the rows are rounded to: 127 steps of the largest of 32 inputs."""
    groups = x.float().unflatten(1, (-1, kernels.GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    steps = (groups * torch.full_like(largest, 127).div(largest)).round().nan_to_num()
    return (steps.double() * (largest / 127).double()).flatten(1)


@pytest.mark.usefixtures("threads")
@each_size
@with_offsets_and_without
@each_dtype
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_quantised_rows(
    shape: tuple[int, int, int], num_rows: int, bits: int, dtype: torch.dtype, *, has_offset: bool
) -> None:
    x, weight, bias = operands(shape, num_rows, bits, dtype, has_offset=has_offset)
    wide = dtype != torch.float32
    found = CpuPackedLinear(weight, bias, wide=wide, invariant=True)(x)
    assert found.dtype == torch.float32
    assert found.shape == (num_rows, shape[1])
    rows = quantized(x)
    wanted = rows @ dequantized(weight).t() + bias.double()
    sizes = 2**bits * weight.scale.abs().amax() * rows.abs().sum(1, keepdim=True) + 1
    bound = (shape[0] / kernels.GROUP + 4) * 4 * FLOAT32 * sizes
    assert ((found.double() - wanted).abs() <= bound).all()


@pytest.mark.skipif(
    "amx_bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"),
    reason="this CPU has no tiles: rows are always quantised",
)
@pytest.mark.usefixtures("threads")
@each_size
@with_offsets_and_without
@pytest.mark.parametrize("num_rows", [40, 65, 701])
@pytest.mark.parametrize("shape", [*SHAPES, (8192, 96, 32)], ids=str)
def test_tiles_multiply_many_rows_as_they_are_with_rounded_weights(
    shape: tuple[int, int, int], num_rows: int, bits: int, *, has_offset: bool
) -> None:
    x, weight, bias = operands(shape, num_rows, bits, torch.bfloat16, has_offset=has_offset)
    found = CpuPackedLinear(weight, bias, wide=True)(x)
    exact = dequantized(weight)
    sizes = x.double().abs() @ exact.abs().t()
    wanted = x.double() @ exact.t() + bias.double()
    assert ((found.double() - wanted).abs() <= 2**-8 * sizes + 1e-5).all()
    # Less than rounding the rows to 8 bits would cost.
    one = x.double().square() @ exact.square().t()
    error = (found.double() - wanted).square().sum() / one.sum()
    assert error.sqrt() < 2**-8
    assert torch.equal(found, CpuPackedLinear(weight, bias, wide=True)(x))


@each_size
def test_the_largest_sums_are_exact(bits: int) -> None:
    shape = (256, 33, 32)
    steps = torch.full((33, 256), 2**bits - 1, dtype=torch.uint8)
    scale = torch.ones(33, 8)
    weight = GroupedWeight(steps, scale, torch.zeros(33, 8), bits)
    for sign in (1.0, -1.0):
        found = CpuPackedLinear(weight, None, wide=True)(torch.full((13, 256), sign).bfloat16())
        exact = sign * (2**bits - 1) * shape[0]
        torch.testing.assert_close(found, torch.full((13, 33), exact), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("threads")
@each_size
@with_offsets_and_without
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", [(256, 96, 64), (1120, 64, 32)], ids=str)
def test_rows_do_not_depend_on_each_other(
    shape: tuple[int, int, int], bits: int, activation: str | None, *, has_offset: bool
) -> None:
    x, weight, bias = operands(shape, 64, bits, torch.bfloat16, has_offset=has_offset)
    x[1:] *= 100
    silu: Activation | None = activation  # type: ignore[assignment]
    linear = CpuPackedLinear(weight, bias, activation=silu, invariant=True)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in (*range(1, 28), 64):  # groups of all sizes
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])


@each_size
def test_gates(bits: int) -> None:
    x, weight, bias = operands((64, 96, 32), 14, bits, torch.bfloat16)
    found = CpuPackedLinear(weight, bias, activation="silu")(x)
    wanted = gated_activation.reference(CpuPackedLinear(weight, bias, wide=True)(x), "silu")
    torch.testing.assert_close(found.float(), wanted, rtol=2**-8, atol=1e-4)


@each_size
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("num_rows", [14, 64])
def test_what_is_not_finite_stays_so_in_its_row_alone(
    bits: int, value: float, num_rows: int
) -> None:
    x, weight, bias = operands((64, 33, 32), num_rows, bits, torch.bfloat16)
    linear = CpuPackedLinear(weight, bias)
    x[3, 40] = value
    found = linear(x)
    assert not found[3].isfinite().any()
    x[3] = 0
    again = linear(x)
    assert torch.equal(again[3], bias)
    others = torch.arange(num_rows) != 3
    assert torch.equal(found[others], again[others])


def test_wrong_arguments_are_named() -> None:
    x, weight, _ = operands((64, 16, 32), 2, 4, torch.bfloat16)
    packed, scale = kernels.pack_int4(weight.steps), kernels.pad_groups(weight.scale)

    def multiply(**changes: Tensor) -> None:
        arguments = {"x": x, "weight": packed, "scale": scale, "offset": scale, **changes}
        given, matrix = arguments.pop("x"), arguments.pop("weight")
        kernels.linear(given, matrix, None, out_features=16, **arguments)

    multiply()
    with pytest.raises(ValueError, match=r"^scale: must have groups of a multiple of 32 inputs"):
        multiply(scale=scale[:, :0])
    with pytest.raises(ValueError, match=r"^scale: must have groups of a multiple of 32 inputs"):
        multiply(scale=torch.cat((scale, scale), 1))
    with pytest.raises(ValueError, match=r"^offset: must have shape"):
        multiply(offset=scale[:, :1])
    with pytest.raises(ValueError, match=r"^offset: must be torch.float16"):
        multiply(offset=scale.double())
    with pytest.raises(ValueError, match=r"^weight: must have shape"):
        multiply(weight=packed[:, :4])
    channels = torch.ones(kernels.packed_columns())
    with pytest.raises(ValueError, match=r"^offset: needs scales of groups"):
        multiply(weight=kernels.pack_uint8(weight.steps), scale=channels)


def test_scales_out_of_the_range_of_float16_do_not_fit() -> None:
    _, weight, _ = operands((64, 16, 32), 1, 4, torch.bfloat16)
    assert weight.fits
    for name in ("scale", "offset"):
        changed = getattr(weight, name).clone()
        changed[3, 1] = -65600
        assert not weight._replace(**{name: changed}).fits


def test_weights_in_groups_are_stacked_with_the_most_bits_and_the_smallest_groups() -> None:
    drawn = [
        operands((64, 16, group_size), 1, bits, torch.bfloat16, has_offset=has_offset)[1]
        for group_size in (32, 64)
        for bits in (4, 8)
        for has_offset in (True, False)
    ]
    for first in drawn:
        for second in drawn:
            both = stack([first, second])
            assert isinstance(both, GroupedWeight)
            assert both.kind == common_kind([first.kind, second.kind])
            assert both.bits == max(first.bits, second.bits)
            assert both.group_size == min(first.group_size, second.group_size)
            assert (both.offset is None) == (first.offset is second.offset is None)
            exact = torch.cat((dequantized(first), dequantized(second)))
            torch.testing.assert_close(dequantized(both), exact)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-4])
def test_weights_are_rounded_to_the_nearest_in_8_bits(size: float) -> None:
    exact = size * torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    exact[3, 32:64] = 0
    weight = round_to_8_bits(exact, 32)
    assert weight.kind == IntegerKind(8, 32)
    assert weight.offset is None
    assert torch.equal(weight.scale, weight.scale.half().float())
    found = weight.dequantized()
    assert not found[3, 32:64].any()
    largest = exact.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    # Half a step, and what the largest loses to a scale that was rounded down, in float16.
    assert ((found - exact).abs() <= largest / 254 + largest / 2**11 + 127 * 2**-25).all()


def test_integers_in_groups_and_without_are_not_stacked() -> None:
    _, weight, _ = operands((64, 16, 32), 1, 4, torch.bfloat16)
    channels = Int8Weight(torch.zeros(16, 64, dtype=torch.int8), torch.ones(16))
    assert isinstance(stack([channels, channels]), Int8Weight)
    assert stack([weight, channels]) is None
    assert common_kind([weight.kind, channels.kind]) is None
