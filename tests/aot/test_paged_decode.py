import pytest
import torch

from kernels.attention.paged_decode import paged_decode_attention
from kernels.attention.split_plan import PROGRAMS_PER_SM, plan_splits
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import GPUS, Compiled, compile_call

FP8 = torch.float8_e4m3fn
# Heads, KV heads, head dimension, soft cap.
MODELS = {
    "Llama-3.1-8B": (32, 8, 128, None),
    "Qwen2.5-0.5B": (14, 2, 64, None),
    "Phi-3-mini": (32, 32, 96, None),
    "Gemma-2-9B": (16, 8, 256, 50.0),
}
each_model = pytest.mark.parametrize(
    "model",
    [
        "Llama-3.1-8B",
        "Qwen2.5-0.5B",
        pytest.param("Phi-3-mini", marks=pytest.mark.slow),
        pytest.param("Gemma-2-9B", marks=pytest.mark.slow),
    ],
)


def compile_decode(
    gpu: str, model: str, cache: torch.dtype, dtype: torch.dtype = torch.bfloat16
) -> Compiled:
    heads, kv_heads, head_dim, soft_cap = MODELS[model]
    with torch.device("meta"):
        query = torch.empty(16, heads, head_dim, dtype=dtype)
        blocks = torch.empty(4096, 16, kv_heads, head_dim, dtype=cache)
        tables, lens = torch.empty(16, 64, dtype=torch.int32), torch.empty(16, dtype=torch.int32)
        scales = torch.empty(kv_heads) if cache == FP8 else None

    def decode() -> None:
        paged_decode_attention(
            query,
            blocks,
            blocks,
            tables,
            lens,
            plan_splits(lens, 66, kv_heads),
            scale=head_dim**-0.5,
            soft_cap=soft_cap,
            key_scale=scales,
            value_scale=scales,
        )

    kernel = compile_call(gpu, decode)[-1]
    assert kernel.kernel == "decode_kernel"
    check([kernel])
    return kernel


def check_copies(kernel: Compiled, tile_bytes: int) -> None:
    """Assert that tiles are copied 16 bytes at a time, num_stages - 1 tiles ahead.

    Unrolled, that is one group of copies per stage: num_stages - 1 before the loop, one in it.
    """
    copies = 2 * tile_bytes // (16 * 32 * kernel.num_warps)
    assert kernel.sass.count("LDGSTS.E.BYPASS.128") == copies * kernel.num_stages


def check_occupancy(kernel: Compiled, programs: int) -> None:
    """Assert the occupancy: number of programs per SM."""
    assert programs * 32 * kernel.num_warps * kernel.registers <= 65536
    # An SM has 1 KiB more shared memory than a program's maximum; each program takes 1 KiB extra.
    available = GPUS[kernel.gpu].shared_memory + 1024
    assert programs * (kernel.shared + 1024) <= available


@each_gpu
@each_model
def test_bfloat16_cache(model: str, gpu: str) -> None:
    kernel = compile_decode(gpu, model, torch.bfloat16)
    assert kernel.num_stages == (3 if gpu == "sm_80" else 4)
    check_copies(kernel, 8192)
    check_occupancy(kernel, PROGRAMS_PER_SM if MODELS[model][2] < 256 else 3)


@each_gpu
@each_model
def test_fp8_cache(model: str, gpu: str) -> None:
    kernel = compile_decode(gpu, model, FP8)
    check_copies(kernel, 8192 if MODELS[model][2] > 64 else 4096)
    check_occupancy(kernel, PROGRAMS_PER_SM if MODELS[model][2] < 256 else 3)
    # An A100 has no fp8 conversion.
    assert ("E4M3.UNPACK_B" in kernel.sass) == (gpu != "sm_80")


@pytest.mark.parametrize("gpu", ["sm_89", "sm_120"])
def test_little_shared_memory(gpu: str) -> None:
    kernel = compile_decode(gpu, "Llama-3.1-8B", torch.bfloat16)
    check_copies(kernel, 8192)
    check_occupancy(kernel, 2)


def test_float32_with_little_shared_memory() -> None:
    compile_decode("sm_89", "Gemma-2-9B", torch.float32, torch.float32)
