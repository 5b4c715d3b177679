import pytest
import torch

from kernels.layer_norm import layer_norm, layer_norm_add
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call


@each_gpu
def test_models(gpu: str) -> None:
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    (kernel,) = found = compile_call(gpu, layer_norm_add, x, x, x[0], x[0], 1e-5)
    check(found)
    assert kernel.registers <= 48, "less than 40 warps fit a multiprocessor"
    for access in ("LDG.E", "STG.E"):
        assert kernel.sass.count(f"{access}.128") == kernel.sass.count(access) > 0


@pytest.mark.parametrize("size", [128, 768, 12288])
def test_short_and_long_rows(size: int) -> None:
    x = torch.empty(64, size, dtype=torch.float16, device="meta")
    check(compile_call("sm_90", layer_norm, x, x[0], None, 1e-5))
    check(compile_call("sm_90", layer_norm_add, x, x, x[0], x[0], 1e-5))
