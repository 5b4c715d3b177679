import pytest
import torch

from kernels.matmul import matmul
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call

# Columns and depth of a projection; the last is a head.
PROJECTIONS = {
    "Llama-3.1-8B qkv": (6144, 4096),
    "Llama-3.1-8B down": (4096, 14336),
    "Qwen2.5-0.5B gate_up": (9728, 896),
    "bundled qkv": (384, 256),
}


@each_gpu
@pytest.mark.parametrize("shape", PROJECTIONS.values(), ids=PROJECTIONS)
def test_models(shape: tuple[int, int], gpu: str) -> None:
    columns, depth = shape
    with torch.device("meta"):
        x = torch.empty(64, depth, dtype=torch.bfloat16)
        weight = torch.empty(columns, depth, dtype=torch.bfloat16)
        (kernel,) = found = compile_call(gpu, matmul, x, weight, weight[:, 0].clone())
    check(found)
    assert kernel.matrix == {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}[gpu]


@each_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_heads(dtype: torch.dtype, gpu: str) -> None:
    with torch.device("meta"):
        x, weight = torch.empty(64, 4096, dtype=dtype), torch.empty(128_256, 4096, dtype=dtype)
    check(compile_call(gpu, matmul, x, weight, None, wide=True))
