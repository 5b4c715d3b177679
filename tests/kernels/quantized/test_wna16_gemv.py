"""The product of one row with codes, through the wrappers that choose it."""

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.quantized import wna16_gemm
from kernels.quantized.codes import Kind, pack, unpack
from kernels.quantized.wna16_gemm import reference, wna16_linear
from kernels.quantized.wna16_gemv import settings, takes, wna16_gemv
from tests.kernels.quantized.test_wna16_gemm import KINDS, weight_of
from tests.kernels.support import DEVICE, TOLERANCES, assert_close, randn

# Columns, depth and group: less than a tile, and several; the depth of a thread, and several of
# a program; runs of 16 to 64 inputs, and a depth that is no multiple of two; one group.
SHAPES = [
    (8, 16, 16),
    (72, 576, 32),
    (65, 144, 144),
    (136, 4224, 128),
    (20, 1152, 96),
    (3, 2112, 64),
    (40, 4096, 4096),
]
ROW_KINDS: tuple[Kind, ...] = ("int4", "int8", "e4m3", "e2m1")
each_dtype = pytest.mark.parametrize(
    "dtype", [dtype for dtype in TOLERANCES if dtype != torch.float32], ids=str
)


@each_dtype
@pytest.mark.parametrize("zeros", ["integers", "none", "fractions"])
@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int, int], kind: Kind, zeros: str, dtype: torch.dtype) -> None:
    columns, depth, group = shape
    if zeros != "integers" and kind in ("e4m3", "e2m1"):
        pytest.skip("floats have no zeros")
    codes, weight = weight_of(kind, columns, depth, group, zeros=zeros)
    x, bias = randn(1, depth, dtype=dtype), randn(columns, dtype=dtype, seed=2)
    assert takes(x, codes)
    assert_close(wna16_gemv(x, codes, bias), x.float() @ weight.t() + bias.float())
    assert_close(wna16_linear(x, codes, None), reference(x, codes, None))


@each_dtype
@pytest.mark.parametrize("scale_type", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_scales_of_8_bits_and_factors(scale_type: torch.dtype, dtype: torch.dtype) -> None:
    columns, depth = 40, 1056
    group = 16 if scale_type == torch.float8_e4m3fn else 32
    draw = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 16, (columns, depth), generator=draw).to(DEVICE, torch.uint8)
    scale = torch.rand(columns, depth // group, generator=draw).add(0.01).to(scale_type).float()
    factor = torch.rand(columns, generator=draw).to(DEVICE)
    if group == 32:
        scale, factor = scale / 2**8, factor * 2**8  # powers that E4M3 has not
    codes = pack(steps, "e2m1", scale.to(DEVICE), factor=factor)
    assert codes.scale.dtype == scale_type
    x = randn(1, depth, dtype=dtype)
    assert_close(wna16_linear(x, codes, None), x.float() @ unpack(codes).t())


@each_dtype
def test_scales_of_blocks(dtype: torch.dtype) -> None:
    codes, weight = weight_of("e4m3", 128, 256, 128, rows=64)
    x = randn(1, 256, dtype=dtype)
    assert_close(wna16_linear(x, codes, None), x.float() @ weight.t())


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("power", [-14, -24, 15])
def test_inputs_of_any_size(kind: Kind, power: int) -> None:
    """Also those of less than the normal range: integers are multiplied as such numbers."""
    codes, weight = weight_of(kind, 24, 1024, 64)
    x = (randn(1, 1024).sign() * 2.0**power).half()
    expected = x.double() @ weight.double().t()
    if power > 0:  # results that float16 has
        codes = codes._replace(scale=(codes.scale.float() / 2**12).to(codes.scale.dtype))
        expected = x.double() @ unpack(codes).double().t()
    bias = torch.zeros(24, dtype=torch.float16, device=DEVICE)
    least = 2.0**-24 / expected.square().mean().sqrt().item()  # steps of a small float16
    assert_close(wna16_gemv(x, codes, bias), expected, max(1e-3, least))


def test_what_is_not_finite_stays_in_its_output() -> None:
    codes, _ = weight_of("int4", 40, 576, 64)
    scale = codes.scale.clone()
    scale[3, 2] = torch.nan
    x = randn(1, 576, dtype=torch.float16)
    found = wna16_linear(x, codes._replace(scale=scale), None).isnan()
    assert found.nonzero().tolist() == [[0, 3]]
    x[0, 5] = torch.nan
    assert wna16_linear(x, codes, None).isnan().all()


def test_others_are_multiplied_with_matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows, tables, depths and addresses that are no multiples of 16, and invariant rows."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("one row")

    monkeypatch.setattr(wna16_gemm, "wna16_gemv", refuse)
    for kind in KINDS:
        codes, weight = weight_of(kind, 24, 64, 32)
        x = randn(2, 64, dtype=torch.float16)
        wna16_linear(x, codes, None)
        wna16_linear(x[:1], codes, None, invariant=True)
        shifted = randn(1, 65, dtype=torch.float16)[:, 1:]
        assert_close(wna16_linear(shifted, codes, None), shifted.float() @ weight.t())
        if kind == "table4":
            wna16_linear(x[:1], codes, None)


def test_warps_share_a_tile_where_there_are_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "INTERPRETED", False)
    assert settings(28672, 2048, 132)["num_warps"] == 1
    assert settings(4096, 7168, 132)["num_warps"] == 4
    assert settings(4096, 512, 132)["num_warps"] == 1
