import pytest
import torch

from kernels.gated_activation import gated_activation
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import Compiled, compile_call


def _check_wide(found: list[Compiled]) -> None:
    check(found)
    for kernel in found:
        assert kernel.registers <= 32, "not all warps of a multiprocessor fit"
        for access in ("LDG.E", "STG.E"):
            assert kernel.sass.count(f"{access}.128") == kernel.sass.count(access) > 0


@each_gpu
def test_models(gpu: str) -> None:
    llama = torch.empty(64, 2 * 14336, dtype=torch.bfloat16, device="meta")
    _check_wide(compile_call(gpu, gated_activation, llama, "silu"))
    gemma = torch.empty(64, 2 * 9216, dtype=torch.bfloat16, device="meta")
    _check_wide(compile_call(gpu, gated_activation, gemma, "gelu_tanh"))


def test_rows_that_do_not_fill_their_tiles() -> None:
    qwen = torch.empty(64, 2 * 4864, dtype=torch.bfloat16, device="meta")
    _check_wide(compile_call("sm_90", gated_activation, qwen, "silu"))


@pytest.mark.large
def test_the_error_function() -> None:
    gate_up = torch.empty(64, 2 * 4096, dtype=torch.float16, device="meta")
    _check_wide(compile_call("sm_90", gated_activation, gate_up, "gelu"))
