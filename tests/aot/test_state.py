import pytest
import torch
from torch import Tensor

from kernels.state.delta_rule import gated_delta_rule
from kernels.state.short_conv import short_conv
from kernels.state.states import StateCache, StepStates
from kernels.state.sub_chunks import index_sub_chunks
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import Compiled, compiling_for

# Heads of keys and of values, their sizes, taps of the convolution.
MODELS = {
    "Qwen3.5-9B": (16, 32, 128, 128, 4),
    "OLMo-Hybrid": (30, 30, 96, 192, 4),
}


def _step(num_rows: int, num_saves: int = 4) -> StepStates:
    def array(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32)

    rows = array(num_rows)
    return StepStates(array(num_rows + 1), rows, rows, rows, array(num_rows, num_saves, 2))


def compile_delta_rule(
    gpu: str,
    model: str,
    *,
    rows: int = 16,
    tokens: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    is_invariant: bool = False,
    stack: int = 0,
) -> dict[str, Compiled]:
    key_heads, heads, key, value, kernel = MODELS[model]
    with torch.device("meta"), compiling_for(gpu) as found:
        channels, values = 2 * key_heads * key + heads * value, heads * value
        qkv, z = torch.empty(tokens, channels + values, dtype=dtype).split([channels, values], 1)
        beta, decay = torch.empty(tokens, 2 * heads, dtype=dtype).chunk(2, 1)
        ring = torch.empty(8, kernel, channels, dtype=dtype)
        gated_delta_rule(
            qkv,
            z,
            beta,
            decay,
            conv_weight=torch.empty(kernel, channels, dtype=dtype).t(),
            decay=torch.empty(heads),
            dt_bias=torch.empty(heads),
            norm_weight=torch.empty(value),
            norm_eps=1e-6,
            num_key_heads=key_heads,
            gate="silu",
            cache=StateCache(ring, torch.empty(8, heads, key, value)),
            step=_step(rows),
            is_invariant=is_invariant,
        )
    check(found, stack=stack)
    return {f"{kernel.module.rpartition('.')[2]}.{kernel.kernel}": kernel for kernel in found}


@each_gpu
def test_delta_rule_of_qwen3_5(gpu: str) -> None:
    kernels = compile_delta_rule(gpu, "Qwen3.5-9B")
    decode = kernels["delta_decode._kernel"]
    # Two programs, with 64 KiB of state each, share an SM; its rows are read 16 bytes at a time.
    assert 2 * 32 * decode.num_warps * decode.registers <= 65536
    assert decode.sass.count("LDG.E.128") >= 16
    assert decode.sass.count("STG.E.128") >= 16
    # A multiprocessor has room for half of its threads.
    assert kernels["delta_chunks._convolve_kernel"].registers <= 64
    for name in ("local", "states", "outputs"):
        assert kernels[f"delta_chunks._{name}_kernel"].matrix, "products need matrix instructions"
    if gpu == "sm_90":
        assert kernels["delta_chunks._states_kernel"].matrix == "wgmma"
        outputs = kernels["delta_chunks._outputs_kernel"]
        assert outputs.matrix == "wgmma"
        assert 2 * 32 * outputs.num_warps * outputs.registers <= 65536
        # The next sub-chunk is copied while one is multiplied.
        assert "LDGSTS" in kernels["delta_chunks._states_kernel"].sass


@each_gpu
def test_delta_rule_token_by_token(gpu: str) -> None:
    kernels = compile_delta_rule(gpu, "Qwen3.5-9B", is_invariant=True)
    assert set(kernels) == {"delta_decode._kernel", "sub_chunks._kernel", "rings._rings_kernel"}


@each_gpu
@pytest.mark.large
def test_delta_rule_of_wide_values(gpu: str) -> None:
    # Of the results' kernel on an A100, whose products take their operands from registers.
    compile_delta_rule(gpu, "OLMo-Hybrid", stack=24 if gpu == "sm_80" else 0)


def test_every_number_of_rows_and_tokens_runs_the_same_code() -> None:
    """Steps of any shape; this must not recompile."""
    codes: dict[str, set[bytes]] = {}
    for rows, tokens in ((16, 512), (9, 77)):
        for name, kernel in compile_delta_rule(
            "sm_90", "Qwen3.5-9B", rows=rows, tokens=tokens
        ).items():
            codes.setdefault(name, set()).add(kernel.cubin)
    assert {name: len(found) for name, found in codes.items()} == dict.fromkeys(codes, 1)


@each_gpu
def test_short_conv_of_lfm2(gpu: str) -> None:
    with torch.device("meta"), compiling_for(gpu) as found:
        weight = torch.empty(2048, 3, dtype=torch.bfloat16)
        ring = torch.empty(8, 3, 2048, dtype=torch.bfloat16)
        projected = torch.empty(512, 3 * 2048, dtype=torch.bfloat16)
        short_conv(projected, weight, None, StateCache(ring, None), _step(16))
    check(found)
    for kernel in found:
        if kernel.module.endswith("short_conv"):
            assert kernel.registers <= 64, "half of a multiprocessor's threads have room"


@each_gpu
@pytest.mark.parametrize("num_rows", [16, 1024])
def test_index_of_sub_chunks(num_rows: int, gpu: str) -> None:
    with torch.device("meta"), compiling_for(gpu) as found:
        step = _step(num_rows)
        index_sub_chunks(step.query_start_loc, step.seq_lens, step.writes, 8192)
    check(found)
