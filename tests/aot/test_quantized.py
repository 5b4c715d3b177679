"""Products with quantised weights, for the projections of real models."""

import pytest
import torch
from torch import Tensor

from kernels.e4m3 import FP8
from kernels.quantized.codes import BITS, Codes, Kind
from kernels.quantized.fp8_gemm import GROUP, fp8_linear
from kernels.quantized.gated_rows import gated_rows
from kernels.quantized.normed_rows import normed_rows
from kernels.quantized.rows import quantize_rows
from kernels.quantized.wna16_gemm import wna16_linear
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call

# Columns and depth of a projection.
PROJECTIONS = {
    "Llama-3.1-8B down": (4096, 14336),
    "Qwen2.5-0.5B gate_up": (9728, 896),
}
UNITS = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}
each_fp8_gpu = pytest.mark.parametrize("gpu", ["sm_89", "sm_90", "sm_100"])  # that multiplies FP8
each_projection = pytest.mark.parametrize("shape", PROJECTIONS.values(), ids=PROJECTIONS)
each_number = pytest.mark.parametrize("tokens", [1, 2, 64, 512])


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@each_fp8_gpu
@pytest.mark.parametrize("size", [GROUP, 896, 4096, 14336])
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_rows(size: int, is_static: bool, gpu: str) -> None:
    scale = _empty(1, dtype=torch.float32) if is_static else None
    check(compile_call(gpu, quantize_rows, _empty(64, size), scale))


@each_fp8_gpu
@pytest.mark.parametrize("size", [4864, 14336])
@pytest.mark.parametrize("group", [None, GROUP])
def test_gated_rows(size: int, group: int | None, gpu: str) -> None:
    check(compile_call(gpu, gated_rows, _empty(64, 2 * size), "silu", group=group))


@each_fp8_gpu
@pytest.mark.parametrize("size", [896, 4096, 8192])
@pytest.mark.parametrize("group", [None, GROUP])
def test_normed_rows(size: int, group: int | None, gpu: str) -> None:
    x = _empty(64, size)
    check(compile_call(gpu, normed_rows, x, x, x[0], 1e-5, unit_offset=False, group=group))
    check(compile_call(gpu, normed_rows, x, None, x[0], 1e-5, unit_offset=True, group=group))


@each_fp8_gpu
@each_number
@pytest.mark.parametrize("in_blocks", [False, True], ids=["rows", "blocks"])
@each_projection
def test_fp8(shape: tuple[int, int], in_blocks: bool, tokens: int, gpu: str) -> None:
    columns, depth = shape
    groups = depth // GROUP if in_blocks else 1
    found = compile_call(
        gpu,
        fp8_linear,
        _empty(tokens, depth, dtype=FP8),
        _empty(tokens, groups, dtype=torch.float32),
        _empty(columns, depth, dtype=FP8),
        _empty(columns // GROUP if in_blocks else columns, groups, dtype=torch.float32),
        _empty(columns),
        torch.bfloat16,
    )
    check(found)
    assert found[0].matrix == UNITS.get(gpu, "mma")


# Kind, inputs per scale (None: all) and type of the shifts.
CODES: dict[str, tuple[Kind, int | None, torch.dtype | None]] = {
    "awq": ("int4", 128, torch.int8),
    "w4a16": ("int4", 32, None),
    "q4_k": ("int4", 32, torch.float16),
    "nf4": ("table4", 64, None),
    "nvfp4": ("e2m1", 16, None),
    "gptq-8": ("int8", 128, torch.int8),
    "fp8 rows": ("e4m3", None, None),
    "fp8 blocks": ("e4m3", 128, None),
}


@each_gpu
@each_number
@pytest.mark.parametrize("name", CODES)
def test_codes(name: str, tokens: int, gpu: str) -> None:
    kind, group, shifts = CODES[name]
    columns, depth = PROJECTIONS["Llama-3.1-8B down"]
    has_halves = BITS[kind] == 4
    scale_type = torch.float8_e4m3fn if name == "nvfp4" else torch.float16
    group = group or depth
    rows = 128 if name == "fp8 blocks" else 1
    scales = columns // rows, depth // group
    weight = Codes(
        _empty(columns, depth // (1 + has_halves), dtype=torch.uint8),
        kind,
        min(group & -group, 64),
        depth,
        _empty(*scales, dtype=scale_type),
        None if shifts is None else _empty(*scales, dtype=shifts),
        _empty(16, dtype=torch.float32) if kind == "table4" else None,
        _empty(columns, dtype=torch.float32) if name == "nvfp4" else None,
    )
    found = compile_call(gpu, wna16_linear, _empty(tokens, depth), weight, _empty(columns))
    # For sm_100 ptxas puts two values on the stack, although half of the registers are free.
    is_odd = (name, tokens, gpu) == ("nvfp4", 1, "sm_100")
    check(found, stack=8 if is_odd else 0)
    if kind == "table4" or tokens == 512:
        assert [each.kernel for each in found] == ["_kernel"]
        assert not found[0].matrix  # it writes the weight, which cuBLAS multiplies
    elif tokens == 1:
        assert not found[0].matrix
        assert found[0].registers <= 168  # 12 warps share an SM
        assert found[0].shared <= 128  # of the sums of 4 warps: no others move between threads
    else:
        # For instructions of warpgroups; others have them all the same.
        is_short = kind == "int4" and weight.is_whole and weight.run < 64 and tokens <= 16
        assert found[0].matrix == ("mma" if is_short else UNITS.get(gpu, "mma"))
