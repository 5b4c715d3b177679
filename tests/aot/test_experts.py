"""The kernels of mixtures of experts, for the experts of real models."""

import pytest
import torch
import triton
from torch import Tensor

from kernels.experts.activation import ExpertActivation
from kernels.experts.combine import combine
from kernels.experts.grouped_gemm import block_rows, expert_gated_linear, expert_linear
from kernels.experts.routing import route
from kernels.experts.sorting import ExpertBlocks, sort_by_expert
from kernels.quantized.codes import BITS, Codes, Kind
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import Compiled, compile_call

GPT_OSS = ExpertActivation(alpha=1.702, limit=7.0, offset=1.0)
# Hidden and inner features, experts, chosen ones, and whether there are biases.
MIXTURES = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8, False),
    "Mixtral-8x7B": (4096, 14336, 8, 2, False),
    "gpt-oss-20b": (2880, 2880, 32, 4, True),
}
TOKENS = 64
# Before release 3.8 Triton keeps two values of a program of 128 experts there.
ROUTING_STACK = 8 if [int(n) for n in triton.__version__.split(".")[:2]] < [3, 8] else 0

each_mixture = pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _products(
    gpu: str, mixture: tuple[int, int, int, int, bool], dtype: torch.dtype, *, large: bool
) -> list[Compiled]:
    hidden, inner, num, top_k, has_bias = mixture
    rows = block_rows(dtype, 1, 1, invariant=large)
    blocks = ExpertBlocks(_empty(100, rows, dtype=torch.int32), _empty(100, dtype=torch.int32))
    gated = compile_call(
        gpu,
        expert_gated_linear,
        _empty(TOKENS, hidden, dtype=dtype),
        _empty(num, 2 * inner, hidden, dtype=dtype),
        _empty(num, 2 * inner, dtype=dtype) if has_bias else None,
        blocks,
        GPT_OSS if has_bias else ExpertActivation(),
        top_k=top_k,
    )
    plain = compile_call(
        gpu,
        expert_linear,
        _empty(TOKENS * top_k, inner, dtype=dtype),
        _empty(num, hidden, inner, dtype=dtype),
        _empty(num, hidden, dtype=dtype) if has_bias else None,
        blocks,
    )
    return gated + plain


@each_gpu
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@each_mixture
def test_products(mixture: tuple[int, int, int, int, bool], large: bool, gpu: str) -> None:
    found = _products(gpu, mixture, torch.bfloat16, large=large)
    check(found)
    assert len(found) == 2
    units = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}
    # 16 rows are fewer than the instructions of warpgroups take.
    assert {kernel.matrix for kernel in found} == {units[gpu] if large else "mma"}


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_products_in_float32(large: bool) -> None:
    check(_products("sm_90", MIXTURES["Qwen3-30B-A3B"], torch.float32, large=large))


# Kind, inputs per scale (None: all), output channels per scale, and types of scales and shifts.
CODES: dict[str, tuple[Kind, int | None, int, torch.dtype, torch.dtype | None]] = {
    "mxfp4": ("e2m1", 32, 1, torch.float8_e8m0fnu, None),
    "awq": ("int4", 64, 1, torch.float16, torch.int8),
    "w8a16": ("int8", None, 1, torch.bfloat16, None),
    "fp8 rows": ("e4m3", None, 1, torch.float32, None),
    "fp8 blocks": ("e4m3", 64, 64, torch.float32, None),
}


def _codes(name: str, experts: int, rows: int, depth: int) -> Codes:
    kind, group, shared, scales, shifts = CODES[name]
    group = group or depth
    run = min(group & -group, 64)
    in_bytes = run * -(-depth // (2 * run)) if BITS[kind] == 4 else depth
    shape = experts, rows // shared, depth // group
    return Codes(
        _empty(experts, rows, in_bytes, dtype=torch.uint8),
        kind,
        run,
        depth,
        _empty(*shape, dtype=scales),
        None if shifts is None else _empty(*shape, dtype=shifts),
    )


@each_gpu
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", CODES)
def test_products_with_codes(name: str, large: bool, gpu: str) -> None:
    hidden, inner, num, top_k, has_bias = MIXTURES["gpt-oss-20b"]
    rows = block_rows(torch.bfloat16, 1, 1, invariant=large)
    blocks = ExpertBlocks(_empty(100, rows, dtype=torch.int32), _empty(100, dtype=torch.int32))
    found = compile_call(
        gpu,
        expert_gated_linear,
        _empty(TOKENS, hidden),
        _codes(name, num, 2 * inner, hidden),
        _empty(num, 2 * inner) if has_bias else None,
        blocks,
        GPT_OSS,
        top_k=top_k,
    )
    found += compile_call(
        gpu,
        expert_linear,
        _empty(TOKENS * top_k, inner),
        _codes(name, num, hidden, inner),
        _empty(num, hidden) if has_bias else None,
        blocks,
    )
    check(found)
    assert len(found) == 2
    units = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}
    assert {kernel.matrix for kernel in found} == {units[gpu]}


@each_gpu
@each_mixture
def test_what_is_around_them(mixture: tuple[int, int, int, int, bool], gpu: str) -> None:
    hidden, _, num, top_k, _ = mixture
    experts, weights = (
        _empty(TOKENS, top_k, dtype=dtype) for dtype in (torch.int32, torch.float32)
    )
    totals, slots = (_empty(size, dtype=torch.int64) for size in (num, TOKENS))
    routing = compile_call(gpu, route, _empty(TOKENS, num), top_k, normalize=True, slots=slots)
    check(routing, stack=ROUTING_STACK)
    check(compile_call(gpu, sort_by_expert, experts, totals, 16))
    check(compile_call(gpu, combine, _empty(TOKENS * top_k, hidden), experts, weights))


@each_gpu
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_choice_with_a_bias(scores: str, gpu: str) -> None:
    bias = _empty(128, dtype=torch.float32)
    logits = _empty(TOKENS, 128, dtype=torch.float32)
    check(compile_call(gpu, route, logits, 8, normalize=True, scores=scores, bias=bias))


def test_the_most_experts() -> None:
    check(compile_call("sm_90", route, _empty(TOKENS, 4096), 8, normalize=False))
