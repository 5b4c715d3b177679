import pytest
import torch

from kernels.attention.paged_prefill import paged_prefill_attention
from tests.aot.bounds import check, each_gpu, every_gpu
from tests.aot.compiler import GPUS, Compiled, compile_call

FP8 = torch.float8_e4m3fn
# Heads, KV heads, head dimension, soft cap.
MODELS = {
    "Llama-3.1-8B": (32, 8, 128, None),
    "Qwen2.5-0.5B": (14, 2, 64, None),
    "Phi-3-mini": (32, 32, 96, None),
    "Gemma-2-9B": (16, 8, 256, 50.0),
    "bundled": (8, 2, 32, None),
}
# Tokens and sequences: enough for large tiles, and too few for them.
STEPS = {"long": (8192, 1), "short": (64, 16)}


def compile_prefill(
    gpu: str,
    model: str,
    step: str,
    *,
    cache: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    sliding_window: int | None = None,
    block_size: int = 16,
    is_invariant: bool = False,
) -> Compiled:
    heads, kv_heads, head_dim, soft_cap = MODELS[model]
    tokens, sequences = STEPS[step]
    with torch.device("meta"):
        query = torch.empty(tokens, heads, head_dim, dtype=dtype)
        blocks = torch.empty(4096, block_size, kv_heads, head_dim, dtype=cache)
        scales = torch.empty(kv_heads) if cache == FP8 else None
        (kernel,) = compile_call(
            gpu,
            paged_prefill_attention,
            query,
            blocks,
            blocks,
            torch.empty(sequences, 512, dtype=torch.int32),
            torch.empty(sequences + 1, dtype=torch.int32),
            torch.empty(sequences, dtype=torch.int32),
            scale=head_dim**-0.5,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            key_scale=scales,
            value_scale=scales,
            is_invariant=is_invariant,
        )
    check([kernel])
    return kernel


def check_products(kernel: Compiled) -> None:
    """Assert that whole warpgroups multiply where supported, with products back to back, and that
    neither scores nor weights pass through shared memory."""
    if kernel.gpu == "sm_90":
        products = kernel.sass.count("HGMMA")
        # A product that waits for registers has a WARPGROUP.ARRIVE: here only the first ones do.
        assert products >= 3 * kernel.sass.count("WARPGROUP.ARRIVE") > 0
        loops = kernel.sass[kernel.sass.index("HGMMA") : kernel.sass.rindex("HGMMA")]
        assert " STS" not in loops
    elif kernel.gpu == "sm_100":
        assert "UTCHMMA" in kernel.sass
    else:
        assert "HMMA.16816" in kernel.sass


def check_copies(kernel: Compiled, tile_bytes: int, loops: int = 2) -> None:
    """Assert that keys and values are prefetched 16 bytes at a time, into a buffer per stage.

    After unrolling, that is one group of copies per stage: num_stages - 1 before a loop, one in it.
    """
    copies = 2 * tile_bytes // (16 * 32 * kernel.num_warps)
    assert kernel.sass.count("LDGSTS.E.BYPASS.128") == copies * kernel.num_stages * loops


def check_occupancy(kernel: Compiled, programs: int) -> None:
    """Assert the occupancy: number of programs per SM."""
    assert programs * 32 * kernel.num_warps * kernel.registers <= 65536
    # An SM has 1 KiB more shared memory than a program's maximum; each program takes 1 KiB extra.
    assert programs * (kernel.shared + 1024) <= GPUS[kernel.gpu].shared_memory + 1024


@each_gpu
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen2.5-0.5B"])
def test_bfloat16_cache(model: str, step: str, gpu: str) -> None:
    check_products(compile_prefill(gpu, model, step))


def test_tiles_of_hopper() -> None:
    """Two programs share an SM, or one has all of its shared memory."""
    for model, step, keys, programs in (
        ("Llama-3.1-8B", "long", 128, 1),
        ("Llama-3.1-8B", "short", 64, 2),
        ("Qwen2.5-0.5B", "long", 64, 2),
        ("Qwen2.5-0.5B", "short", 64, 3),
    ):
        kernel = compile_prefill("sm_90", model, step)
        check_copies(kernel, keys * MODELS[model][2] * 2)
        check_occupancy(kernel, programs)


@pytest.mark.parametrize("gpu", ["sm_89", "sm_120"])
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Gemma-2-9B"])
def test_little_shared_memory(model: str, gpu: str) -> None:
    check_products(compile_prefill(gpu, model, "long"))


@each_gpu
def test_wide_heads_with_a_soft_cap(gpu: str) -> None:
    check_products(compile_prefill(gpu, "Gemma-2-9B", "long"))


@each_gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=str)
def test_tiles_that_no_batch_changes(cache: torch.dtype, gpu: str) -> None:
    kernels = [
        compile_prefill(gpu, "Llama-3.1-8B", step, cache=cache, is_invariant=True) for step in STEPS
    ]
    assert kernels[0].constants == kernels[1].constants
    assert kernels[0].num_warps == kernels[1].num_warps
    for kernel in kernels:
        # Additions are fused with products in neither of the loops, so that both round alike.
        assert kernel.sass.count("FFMA") == 0
    if cache == torch.bfloat16:
        check_products(kernels[0])


@pytest.mark.parametrize("model", ["Phi-3-mini", pytest.param("bundled", marks=pytest.mark.large)])
def test_other_heads(model: str) -> None:
    check_products(compile_prefill("sm_90", model, "long"))


def test_sliding_window() -> None:
    check_products(compile_prefill("sm_90", "Llama-3.1-8B", "long", sliding_window=4096))


@each_gpu
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen2.5-0.5B"])
def test_fp8_cache(model: str, gpu: str) -> None:
    compile_prefill(gpu, model, "long", cache=FP8)


@pytest.mark.large
def test_large_blocks() -> None:
    check_products(compile_prefill("sm_90", "Llama-3.1-8B", "long", block_size=64))


@every_gpu
def test_float32(gpu: str) -> None:
    compile_prefill(gpu, "Llama-3.1-8B", "long", cache=torch.float32, dtype=torch.float32)


def test_every_number_of_sequences_and_decode_rows_runs_the_same_code() -> None:
    """Chunks of a mixed step start at any row; this must not recompile."""
    codes = set()
    for num_decodes, num_sequences in ((0, 1), (1, 16), (6, 3)):
        rows = num_decodes + num_sequences
        with torch.device("meta"):
            query = torch.empty(4 * rows, 14, 64, dtype=torch.bfloat16)[num_decodes:]
            blocks = torch.empty(64, 16, 2, 64, dtype=torch.bfloat16)
            (kernel,) = compile_call(
                "sm_90",
                paged_prefill_attention,
                query,
                blocks,
                blocks,
                torch.empty(rows, 513, dtype=torch.int32)[num_decodes:],
                torch.empty(num_sequences + 1, dtype=torch.int32),
                torch.empty(rows, dtype=torch.int32)[num_decodes:],
                scale=0.125,
            )
        codes.add(kernel.cubin)
    assert len(codes) == 1
