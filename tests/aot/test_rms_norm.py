import pytest
import torch

from kernels.rms_norm import rms_norm, rms_norm_add
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call


@each_gpu
@pytest.mark.parametrize("size", [896, 4096])
def test_models(size: int, gpu: str) -> None:
    x = torch.empty(64, size, dtype=torch.bfloat16, device="meta")
    (kernel,) = found = compile_call(gpu, rms_norm_add, x, x, x[0], 1e-5)
    check(found)
    assert kernel.registers <= 40, "less than 48 warps fit a multiprocessor"
    for access in ("LDG.E", "STG.E"):
        assert kernel.sass.count(f"{access}.128") == kernel.sass.count(access) > 0


@pytest.mark.parametrize("size", [128, 3584, 8192, 16384, 32768])
def test_short_and_long_rows(size: int) -> None:
    x = torch.empty(64, size, dtype=torch.bfloat16, device="meta")
    check(compile_call("sm_90", rms_norm_add, x, x, x[0], 1e-5))
    check(compile_call("sm_90", rms_norm, x, x[0], 1e-5, unit_offset=True))
