import pytest
import torch

from kernels.gemv import gated_linear, linear
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call

# Columns and depth of a projection, and whether its gates are activated.
PROJECTIONS = {
    "Llama-3.1-8B qkv": (6144, 4096, False),
    "Llama-3.1-8B gate_up": (28672, 4096, True),
    "Llama-3.1-8B down": (4096, 14336, False),
    "Qwen2.5-0.5B qkv": (1152, 896, False),
    "Qwen2.5-0.5B gate_up": (9728, 896, True),
    "Qwen2.5-0.5B down": (896, 4864, False),
}


@each_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", PROJECTIONS.values(), ids=PROJECTIONS)
def test_models(shape: tuple[int, int, bool], dtype: torch.dtype, gpu: str) -> None:
    columns, depth, is_gated = shape
    with torch.device("meta"):
        x, weight = torch.empty(1, depth, dtype=dtype), torch.empty(columns, depth, dtype=dtype)
    bias = weight[:, 0].clone()
    if is_gated:
        found = compile_call(gpu, gated_linear, x, weight, bias, "silu")
    else:
        found = compile_call(gpu, linear, x, weight, bias)
    check(found)
    assert found[0].registers <= 64  # eight programs share an SM
