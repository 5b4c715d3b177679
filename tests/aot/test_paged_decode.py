import pytest
import torch

from kernels.paged_decode import paged_decode_attention
from kernels.split_plan import PROGRAMS_PER_SM, plan_splits
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
each_cache = pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=["bf16", "fp8"])


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
            plan_splits(lens, 82, kv_heads),
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
    """Assert that every tile is copied 16 bytes at a time, as many tiles ahead as there are stages.

    Unrolled, that is a round of copies per stage: num_stages - 1 before the loop and one in it.
    """
    copies = 2 * tile_bytes // (16 * 32 * kernel.num_warps)
    assert kernel.sass.count("LDGSTS.E.BYPASS.128") == copies * kernel.num_stages


@each_gpu
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen2.5-0.5B", "Phi-3-mini"])
def test_four_programs_share_a_multiprocessor(model: str, gpu: str) -> None:
    kernel = compile_decode(gpu, model, torch.bfloat16)
    check_copies(kernel, 8192)
    assert kernel.num_stages == (3 if gpu == "sm_80" else 4)
    threads = 32 * kernel.num_warps
    assert PROGRAMS_PER_SM * threads * kernel.registers <= 65536
    # A multiprocessor has 1 KiB more than a program can have, and each program takes 1 KiB more.
    available = GPUS[gpu].shared_memory + 1024
    assert PROGRAMS_PER_SM * (kernel.shared + 1024) <= available


@each_gpu
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen2.5-0.5B"])
def test_fp8_cache(model: str, gpu: str) -> None:
    kernel = compile_decode(gpu, model, FP8)
    check_copies(kernel, 64 * MODELS[model][2])
    assert PROGRAMS_PER_SM * 32 * kernel.num_warps * kernel.registers <= 65536
    # Two values per conversion; an A100 has none.
    conversions = kernel.sass.count("E4M3.UNPACK_B")
    assert (conversions == 0) == (gpu == "sm_80")


@each_gpu
def test_wide_heads_with_soft_cap(gpu: str) -> None:
    check_copies(compile_decode(gpu, "Gemma-2-9B", torch.bfloat16), 8192)


@pytest.mark.parametrize("gpu", ["sm_89", "sm_120"])
def test_little_shared_memory(gpu: str) -> None:
    check_copies(compile_decode(gpu, "Llama-3.1-8B", torch.bfloat16), 8192)


def test_float32_with_little_shared_memory() -> None:
    compile_decode("sm_89", "Gemma-2-9B", torch.float32, torch.float32)


@pytest.mark.slow
@each_cache
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_every_combination(model: str, gpu: str, cache: torch.dtype) -> None:
    compile_decode(gpu, model, cache)
