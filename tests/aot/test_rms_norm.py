import pytest
import torch

from kernels.rms_norm import rms_norm, rms_norm_add
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call


@each_gpu
@pytest.mark.parametrize("size", [896, 4096, 8192, 16384])
def test_norms(size: int, gpu: str) -> None:
    x = torch.empty(64, size, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(size, dtype=torch.bfloat16, device="meta")
    for form in ({"unit_offset": False}, {"unit_offset": True}):
        check(compile_call(gpu, rms_norm_add, x, x, weight, 1e-5, **form))
        check(compile_call(gpu, rms_norm, x, weight, 1e-5, **form))
