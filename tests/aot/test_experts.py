import pytest
import torch

from kernels.experts import experts
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call

# Experts, experts per token, hidden size, size of an expert.
MODELS = {"Mixtral-8x7B": (8, 2, 4096, 14336), "Qwen3-30B-A3B": (128, 8, 2048, 768)}


@each_gpu
@pytest.mark.parametrize("tokens", [4, 2048])
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_models(shape: tuple[int, int, int, int], tokens: int, gpu: str) -> None:
    num_experts, top_k, hidden, size = shape
    with torch.device("meta"):
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        gate_up = torch.empty(num_experts, 2 * size, hidden, dtype=torch.bfloat16)
        down = torch.empty(num_experts, hidden, size, dtype=torch.bfloat16)
        ids = torch.empty(tokens, top_k, dtype=torch.int64)
        found = compile_call(gpu, experts, x, gate_up, down, ids, ids.float(), "silu")
    check(found)
    assert len(found) == 2
    if tokens > 4:
        unit = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}[gpu]
        assert [kernel.matrix for kernel in found] == [unit] * 2
