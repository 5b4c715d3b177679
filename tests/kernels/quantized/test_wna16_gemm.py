from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.quantized.codes import BITS, Codes, Kind, expert, pack, stack, unpack
from kernels.quantized.wna16_gemm import reference, wna16_linear
from tests.kernels.support import DEVICE, TOLERANCES, assert_close, randn

# Rows, columns, depth, inputs per scale: less than a tile, several, splits of the depth, runs of
# 16 to 128 inputs, and a depth that is no multiple of two runs.
SHAPES = [
    (1, 8, 16, 16),
    (3, 40, 192, 64),
    (17, 72, 576, 32),
    (65, 136, 128, 128),
    (5, 64, 576, 64),
    (3, 20, 144, 144),
]
KINDS: tuple[Kind, ...] = ("int4", "table4", "e2m1", "int8", "e4m3")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize(
    "dtype", [dtype for dtype in TOLERANCES if dtype != torch.float32], ids=str
)


def weight_of(
    kind: Kind, columns: int, depth: int, group: int, *, zeros: str = "integers", rows: int = 1
) -> tuple[Codes, Tensor]:
    """Return a random weight, and its values computed as its format defines them."""
    draw = torch.Generator().manual_seed(columns)
    most = 2 ** BITS[kind]
    steps = torch.randint(0, most, (columns, depth), generator=draw).to(DEVICE, torch.uint8)
    shape = columns // rows, depth // group
    scale = (0.5 + torch.rand(shape, generator=draw)).to(DEVICE) / 16
    table, offset = None, None
    values = steps.float()
    if kind == "table4":
        table = torch.randn(16, generator=draw).to(DEVICE)
        values = table[steps.int()]
    elif kind == "e2m1":
        exponent, fraction = steps >> 1 & 3, (steps & 1) / 2
        values = torch.where(
            exponent == 0, fraction, (1 + fraction) * 2.0 ** (exponent.float() - 1)
        )
        values = torch.where(steps < 8, values, -values)
    elif kind == "e4m3":
        steps[steps & 127 == 127] = 3  # NaN
        values = steps.view(torch.float8_e4m3fn).float()
    else:
        zero = torch.randint(0, most, shape, generator=draw).float().to(DEVICE)
        if zeros == "none":
            zero = torch.full_like(zero, most // 2)
        elif zeros == "fractions":
            zero += 0.25
        offset = -zero * scale
    found = pack(steps, kind, scale, offset, table)
    scale, offset = (
        None if each is None else each.repeat_interleave(rows, 0).repeat_interleave(group, 1)
        for each in (scale, offset)
    )
    assert scale is not None
    return found, values * scale + (0 if offset is None else offset)


@each_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpacked_weights_are_those_packed(shape: tuple[int, int, int, int], kind: Kind) -> None:
    codes, weight = weight_of(kind, *shape[1:])
    assert_close(unpack(codes), weight)
    halves = 8 // BITS[kind]
    assert shape[2] <= halves * codes.packed.shape[1] < shape[2] + 2 * codes.run


def test_types_are_the_smallest_that_have_the_values() -> None:
    steps = torch.zeros(4, 64, dtype=torch.uint8, device=DEVICE)
    scale = torch.tensor([[0.5], [0.25], [2.0], [3.0]], device=DEVICE)
    power = torch.tensor([[2.0**20], [2.0**-20], [1.0], [4.0]], device=DEVICE)
    powers = pack(steps, "int4", power, -8 * power)
    assert powers.shift is None
    assert powers.scale.dtype == torch.float8_e8m0fnu
    assert pack(steps, "e2m1", scale).scale.dtype == torch.float8_e4m3fn
    assert pack(steps, "int4", 1.125 * scale).scale.dtype == torch.float16
    zeros = pack(steps, "int4", 2.0**-30 * scale, -(2.0**-30) * scale)
    assert zeros.scale.dtype == torch.bfloat16
    assert zeros.shift is not None
    assert zeros.shift.dtype == torch.int8
    fractions = pack(steps, "int4", 1.0001 * scale, scale / 3)
    assert fractions.scale.dtype == torch.float32
    assert fractions.shift is not None
    assert fractions.shift.dtype == torch.float16


def test_experts_are_stacked_in_types_that_all_fit() -> None:
    """Some without shifts, or with whole ones; some with scales that fewer bits have."""
    kinds = ("none", "integers", "fractions")
    each = [weight_of("int4", 24, 128, 64, zeros=zeros) for zeros in kinds]
    plain = pack(torch.zeros(24, 128, dtype=torch.uint8, device=DEVICE), "int4", each[0][1][:, :2])
    together = stack([codes for codes, _ in each] + [plain])
    for i, (_, weight) in enumerate(each):
        assert_close(unpack(expert(together, i)), weight)
    assert torch.equal(unpack(expert(together, 3)), unpack(plain))
    whole = stack([each[0][0], each[1][0]])
    assert whole.shift is not None
    assert whole.shift.dtype == torch.int8


def test_groups_of_one_value_have_no_scale() -> None:
    """Or a small one beside their offset, as GGUF's blocks have."""
    steps = torch.arange(64, dtype=torch.uint8, device=DEVICE).remainder(16).expand(3, 64)
    scale = torch.tensor([[0.0], [2.0**-30], [0.0]], device=DEVICE)
    offset = torch.tensor([[-0.5], [3.0], [0.0]], device=DEVICE)
    weight = unpack(pack(steps, "int4", scale, offset))
    torch.testing.assert_close(weight, offset.expand(3, 64), rtol=2.0**-9, atol=0)


@pytest.mark.usefixtures("path")
@each_dtype
@each_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int, int, int], kind: Kind, dtype: torch.dtype) -> None:
    rows, columns, depth, group = shape
    codes, weight = weight_of(kind, columns, depth, group)
    x = randn(rows, depth + 16, dtype=dtype)[:, :depth]
    bias = randn(columns, dtype=dtype, seed=2) if rows != 3 else None
    out = wna16_linear(x, codes, bias)
    assert out.dtype == dtype
    expected = x.float() @ weight.t() + (0 if bias is None else bias.float())
    assert_close(out, expected)
    assert_close(out, reference(x, codes, bias))
    if rows in (1, 65):
        assert_close(wna16_linear(x, codes, bias, invariant=True), expected)


@each_dtype
@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize(
    ("kind", "zeros", "block"),
    [("int4", "none", 1), ("int4", "fractions", 1), ("int8", "none", 1), ("e4m3", "", 64)],
)
def test_shifts_and_blocks(
    kind: Kind, zeros: str, block: int, rows: int, dtype: torch.dtype
) -> None:
    codes, weight = weight_of(kind, 128, 256, 128, zeros=zeros, rows=block)
    x = randn(rows, 256, dtype=dtype)
    assert_close(wna16_linear(x, codes, None), x.float() @ weight.t())


@each_dtype
@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("scale_type", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_scales_of_8_bits_and_factors(
    scale_type: torch.dtype, rows: int, dtype: torch.dtype
) -> None:
    """As NVFP4 and MXFP4 have: of 16 and of 32 inputs."""
    columns, depth = 40, 96
    group = 16 if scale_type == torch.float8_e4m3fn else 32
    draw = torch.Generator().manual_seed(rows)
    steps = torch.randint(0, 16, (columns, depth), generator=draw).to(DEVICE, torch.uint8)
    scale = torch.rand(columns, depth // group, generator=draw).add(0.01).to(scale_type).float()
    factor = torch.rand(columns, generator=draw).to(DEVICE)
    if group == 32:
        scale, factor = scale / 2**8, factor * 2**8  # powers that E4M3 has not
    scale = scale.to(DEVICE)
    codes = pack(steps, "e2m1", scale, factor=factor)
    assert codes.scale.dtype == scale_type
    x = randn(rows, depth, dtype=dtype)
    assert_close(wna16_linear(x, codes, None), x.float() @ unpack(codes).t())


@each_kind
def test_a_row_gets_the_same_bits_whatever_rows_there_are(kind: Kind) -> None:
    codes, _ = weight_of(kind, 72, 320, 64)
    x = randn(70, 320, dtype=torch.float16)
    together = wna16_linear(x, codes, None, invariant=True)
    for rows in (slice(0, 1), slice(20, 37), slice(5, 70)):
        assert torch.equal(wna16_linear(x[rows], codes, None, invariant=True), together[rows])
    # Of 2 to 16 rows, always: sums of parts have a fixed order.
    few = wna16_linear(x[3:19], codes, None)
    assert torch.equal(wna16_linear(x[4:6], codes, None), few[1:3])


def test_the_depth_is_split_on_large_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, weight = weight_of("int4", 72, 576, 32)
    x = randn(3, 576, dtype=torch.float16)
    limits = replace(device.HOPPER, num_sms=1)
    split = wna16_linear(x, codes, None)
    monkeypatch.setattr(device, "limits", lambda where: limits)
    whole = wna16_linear(x, codes, None)
    assert_close(whole, split)
    assert_close(whole, x.float() @ weight.t())


def test_a_value_that_is_not_finite_stays_in_its_row() -> None:
    codes, _ = weight_of("int4", 40, 576, 64)
    x = randn(5, 576, dtype=torch.float16)
    x[2, 3] = torch.nan
    found = wna16_linear(x, codes, None).isnan()
    assert found[2].all()
    assert found.sum() == 40


@pytest.mark.usefixtures("path")
def test_no_rows() -> None:
    codes, _ = weight_of("int4", 8, 1024, 64)
    assert wna16_linear(randn(0, 1024, dtype=torch.float16), codes, None).shape == (0, 8)


def test_wrong_arguments_are_named() -> None:
    codes, _ = weight_of("int4", 8, 64, 32)
    x, bias = randn(2, 64, dtype=torch.float16), randn(8, dtype=torch.float16)
    with pytest.raises(ValueError, match="x: must be"):
        wna16_linear(x.float(), codes, None)
    with pytest.raises(ValueError, match="x: must have shape"):
        wna16_linear(x[:, :32], codes, None)
    with pytest.raises(ValueError, match="x: the last dimension must be contiguous"):
        wna16_linear(randn(64, 64, dtype=torch.float16).t(), codes, None)
    with pytest.raises(ValueError, match="weight: must be on"):
        wna16_linear(x, codes._replace(packed=codes.packed.to("meta")), None)
    with pytest.raises(ValueError, match="bias: must have shape"):
        wna16_linear(x, codes, bias[:4])
    with pytest.raises(ValueError, match="bias: must be"):
        wna16_linear(x, codes, bias.float())
