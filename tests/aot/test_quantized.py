"""Products with quantised weights, for the projections of real models."""

import pytest
import torch
from torch import Tensor

from kernels.e4m3 import FP8
from kernels.quantized.fp8_product import GROUP, fp8_linear
from kernels.quantized.rows import quantize_rows
from tests.aot.bounds import check
from tests.aot.compiler import compile_call

# Columns and depth of a projection.
PROJECTIONS = {
    "Llama-3.1-8B qkv": (6144, 4096),
    "Llama-3.1-8B down": (4096, 14336),
    "Qwen2.5-0.5B gate_up": (9728, 896),
}
UNITS = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}
each_fp8_gpu = pytest.mark.parametrize("gpu", ["sm_89", "sm_90", "sm_100"])  # that multiplies FP8
each_projection = pytest.mark.parametrize("shape", PROJECTIONS.values(), ids=PROJECTIONS)
each_number = pytest.mark.parametrize("tokens", [1, 64, 512])


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@each_fp8_gpu
@pytest.mark.parametrize("size", [GROUP, 896, 4096, 14336])
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_rows(size: int, is_static: bool, gpu: str) -> None:
    scale = _empty(1, dtype=torch.float32) if is_static else None
    check(compile_call(gpu, quantize_rows, _empty(64, size), scale))


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
