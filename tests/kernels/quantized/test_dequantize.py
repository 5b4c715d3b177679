"""Weights of codes written out, and products of many rows, for which they are."""

import pytest
import torch
from torch import Tensor

from kernels.quantized import wna16_gemm
from kernels.quantized.codes import Codes, Kind, expert, pack, stack, unpack
from kernels.quantized.dequantize import dequantize
from kernels.quantized.wna16_gemm import MOST_TILED, reference, wna16_linear
from tests.kernels.quantized.test_wna16_gemm import SHAPES, each_dtype, each_kind, weight_of
from tests.kernels.support import DEVICE, assert_close, randn


@each_dtype
@each_kind
@pytest.mark.parametrize("zeros", ["integers", "none", "fractions"])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 3, 9008, 9008), (1, 5, 4128, 96)], ids=str)
def test_weights(
    shape: tuple[int, int, int, int], zeros: str, kind: Kind, dtype: torch.dtype
) -> None:
    codes, weight = weight_of(kind, *shape[1:], zeros=zeros)
    found = dequantize(codes, dtype)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(found, unpack(codes).to(dtype))
    assert_close(found, weight)


@each_dtype
@pytest.mark.parametrize("scale_type", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_scales_of_8_bits_blocks_of_rows_and_factors(
    scale_type: torch.dtype, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 16, (24, 96), generator=draw).to(DEVICE, torch.uint8)
    scale = torch.rand(6, 3, generator=draw).add(0.01).to(scale_type).float().to(DEVICE)
    factor = torch.rand(24, generator=draw).to(DEVICE)
    codes = pack(steps, "e2m1", scale, factor=factor)
    assert torch.equal(dequantize(codes, dtype), unpack(codes).to(dtype))


def _rows(codes: Codes, rows: slice) -> Codes:
    shift = None if codes.shift is None else codes.shift[rows]
    return codes._replace(packed=codes.packed[rows], scale=codes.scale[rows], shift=shift)


@each_dtype
@each_kind
@pytest.mark.parametrize("halves", [False, True], ids=["plain", "gates and ups"])
def test_experts(halves: bool, kind: Kind, dtype: torch.dtype) -> None:
    whole, _ = weight_of(kind, 60, 192, 32)
    codes = stack([_rows(whole, slice(i, i + 20)) for i in (0, 20, 40)])
    found = dequantize(codes, dtype, halves=halves)
    for i, one in enumerate(found):
        rows = unpack(expert(codes, i)).to(dtype)
        if halves:
            assert torch.equal(one[::2], rows[:10])
            assert torch.equal(one[1::2], rows[10:])
        else:
            assert torch.equal(one, rows)


@each_dtype
@each_kind
def test_products_of_many_rows(
    kind: Kind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Tensor] = []

    def write(*arguments: object) -> Tensor:
        written.append(dequantize(*arguments))  # type: ignore[arg-type]
        return written[-1]

    monkeypatch.setattr(wna16_gemm, "dequantize", write)
    codes, _ = weight_of(kind, 40, 192, 64)
    x, bias = randn(MOST_TILED + 1, 192, dtype=dtype), randn(40, dtype=dtype, seed=2)
    assert_close(wna16_linear(x, codes, bias), reference(x, codes, bias))
    assert len(written) == 1
    assert_close(wna16_linear(x[:-1], codes, bias), reference(x[:-1], codes, bias))
    wna16_linear(x[:70], codes, bias, invariant=True)
    assert len(written) == 1 + (kind == "table4")
