import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.experts.activation import ExpertActivation
from kernels.experts.grouped_gemm import block_rows, expert_gated_linear, expert_linear, reference
from kernels.experts.sorting import ExpertBlocks, sort_by_expert
from kernels.quantized import codes as formats
from kernels.quantized.codes import Codes, Kind, stack, unpack
from tests.kernels.quantized.test_wna16_gemm import weight_of
from tests.kernels.support import DEVICE, TOLERANCES, assert_close, each_dtype, padded, randn

GPT_OSS = ExpertActivation(alpha=1.702, limit=0.7, offset=1.0)  # a limit that values reach

# Tokens, choices, experts, columns (pairs of rows if gated), depth.
SHAPES = [(1, 1, 1, 1, 1), (3, 2, 5, 20, 33), (40, 2, 2, 33, 130)]

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_activation = pytest.mark.parametrize(
    "activation", [ExpertActivation(), GPT_OSS], ids=["silu", "gpt-oss with bias"]
)
each_size = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])


def _experts(num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    scores = randn(num_tokens, num_experts, seed=9)
    return scores.argsort(-1)[:, :top_k].to(torch.int32).contiguous()


def _blocks(experts: Tensor, num_experts: int, rows: int) -> ExpertBlocks:
    totals = torch.zeros(num_experts, dtype=torch.int64, device=DEVICE)
    return sort_by_expert(experts, totals, rows)


def _rows(dtype: torch.dtype, large: bool) -> int:
    return block_rows(dtype, 1, 1, invariant=large)


def test_the_formula_is_silu_and_that_of_gpt_oss() -> None:
    gate, up = randn(40), randn(40, seed=1)
    assert_close(ExpertActivation()(gate, up), F.silu(gate) * up)
    for g, u in ((8.0, 9.0), (-9.0, -8.0), (0.5, 0.25)):
        least, most = min(g, 7.0), max(min(u, 7.0), -7.0)
        wanted = (most + 1) * least / (1 + math.exp(-1.702 * least))
        found = ExpertActivation(alpha=1.702, limit=7.0, offset=1.0)(
            torch.tensor(g), torch.tensor(u)
        )
        assert found.item() == pytest.approx(wanted, rel=1e-6)


def test_the_reference_multiplies_each_choice_with_its_expert() -> None:
    x, weight, bias = randn(6, 9), randn(4, 5, 9, seed=1), randn(4, 5, seed=2)
    experts = _experts(6, 3, 4)
    found = reference(x, weight, bias, _blocks(experts, 4, 16), top_k=3)
    for choice, expert in enumerate(experts.flatten().tolist()):
        assert_close(found[choice], F.linear(x[choice // 3], weight[expert], bias[expert]))


@pytest.mark.usefixtures("path")
@each_dtype
@each_size
@each_shape
def test_products(shape: tuple[int, int, int, int, int], large: bool, dtype: torch.dtype) -> None:
    num_tokens, top_k, num_experts, columns, depth = shape
    x = padded(randn(num_tokens, depth, dtype=dtype))
    weight = randn(num_experts, columns, depth, dtype=dtype, seed=1)
    bias = randn(num_experts, columns, dtype=dtype, seed=2) if large else None
    experts = _experts(num_tokens, top_k, num_experts)
    blocks = _blocks(experts, num_experts, _rows(dtype, large))
    out = expert_linear(x, weight, bias, blocks, top_k=top_k)
    assert out.dtype == dtype
    assert_close(out, reference(x, weight, bias, blocks, top_k=top_k))


@pytest.mark.usefixtures("path")
@each_dtype
@each_size
@each_activation
@each_shape
def test_gated_products(
    shape: tuple[int, int, int, int, int],
    activation: ExpertActivation,
    large: bool,
    dtype: torch.dtype,
) -> None:
    num_tokens, top_k, num_experts, pairs, depth = shape
    x = padded(randn(num_tokens, depth, dtype=dtype) / depth**0.5)
    weight = randn(num_experts, 2 * pairs, depth, dtype=dtype, seed=1)
    bias = randn(num_experts, 2 * pairs, dtype=dtype, seed=2)
    bias = bias if activation is GPT_OSS else None
    experts = _experts(num_tokens, top_k, num_experts)
    blocks = _blocks(experts, num_experts, _rows(dtype, large))
    out = expert_gated_linear(x, weight, bias, blocks, activation, top_k=top_k)
    assert out.shape == (num_tokens * top_k, pairs)
    assert_close(out, reference(x, weight, bias, blocks, activation, top_k=top_k))


# Values of codes, inputs per scale, and output channels; shapes fill no tile, run or block.
WNA16: tuple[tuple[Kind, int, int], ...] = (
    ("e2m1", 32, 1),
    ("table4", 64, 1),
    ("int4", 48, 1),
    ("int8", 144, 1),
    ("e4m3", 144, 1),
    ("e4m3", 16, 4),
)
each_wna16 = pytest.mark.parametrize("wna16", WNA16, ids=str)
each_narrow_dtype = pytest.mark.parametrize(
    "dtype", [dtype for dtype in TOLERANCES if dtype != torch.float32], ids=str
)


def _wna16(kind: Kind, group: int, shared: int, experts: int, rows: int) -> tuple[Codes, Tensor]:
    """Return random codes of experts, and their weights in float32."""
    depth = 3 * group if group < 100 else group
    each = [
        weight_of(kind, rows, depth, group, zeros=("integers", "none")[i % 2], rows=shared)
        for i in range(experts)
    ]
    each = [(c._replace(scale=c.scale * (i + 1)), w * (i + 1)) for i, (c, w) in enumerate(each)]
    codes = stack([codes for codes, _ in each])
    assert [unpack(formats.expert(codes, i)).shape for i in range(experts)] == [
        (rows, depth)
    ] * experts
    return codes, torch.stack([weight for _, weight in each])


@pytest.mark.usefixtures("path")
@each_narrow_dtype
@each_size
@each_wna16
def test_products_with_codes(wna16: tuple[Kind, int, int], large: bool, dtype: torch.dtype) -> None:
    codes, weight = _wna16(*wna16, 3, 40)
    x = padded(randn(21, weight.shape[2], dtype=dtype) / weight.shape[2] ** 0.5)
    bias = randn(3, 40, dtype=dtype, seed=2) if large else None
    blocks = _blocks(_experts(21, 2, 3), 3, _rows(dtype, large))
    out = expert_linear(x, codes, bias, blocks, top_k=2)
    assert out.dtype == dtype
    assert_close(out, reference(x, weight, bias, blocks, top_k=2))
    for activation in (ExpertActivation(), GPT_OSS):
        out = expert_gated_linear(x, codes, bias, blocks, activation, top_k=2)
        order = torch.arange(40, device=DEVICE).view(2, 20).t().flatten()  # gates and ups alternate
        its_bias = None if bias is None else bias[:, order]
        wanted = reference(x, weight[:, order], its_bias, blocks, activation, top_k=2)
        assert_close(out, wanted, 2 * TOLERANCES[dtype])  # torch's form rounds gates and ups, too


@each_wna16
def test_codes_give_a_row_the_same_bits_whatever_rows_there_are(
    wna16: tuple[Kind, int, int],
) -> None:
    codes, weight = _wna16(*wna16, 3, 40)
    x = randn(30, weight.shape[2], dtype=torch.float16)
    experts, rows = _experts(30, 2, 3), _rows(torch.float16, large=True)
    together = expert_linear(x, codes, None, _blocks(experts, 3, rows), top_k=2)
    for part in (slice(0, 1), slice(11, 30)):
        others = _blocks(experts[part].contiguous(), 3, rows)
        found = expert_linear(x[part], codes, None, others, top_k=2)
        assert torch.equal(found, together[2 * part.start : 2 * part.stop])


@each_dtype
def test_a_row_gets_the_same_bits_whatever_rows_there_are(dtype: torch.dtype) -> None:
    x, weight = randn(50, 96, dtype=dtype), randn(3, 40, 96, dtype=dtype, seed=1)
    experts, rows = _experts(50, 2, 3), _rows(dtype, large=True)
    together = expert_linear(x, weight, None, _blocks(experts, 3, rows), top_k=2)
    for first, count in ((0, 1), (7, 2), (11, 33)):
        part = slice(first, first + count)
        others = _blocks(experts[part].contiguous(), 3, rows)
        found = expert_linear(x[part], weight, None, others, top_k=2)
        assert torch.equal(found, together[2 * first : 2 * (first + count)])


@pytest.mark.usefixtures("path")
@each_activation
def test_a_value_that_is_not_finite_stays_in_its_row(activation: ExpertActivation) -> None:
    x, weight = randn(5, 33), randn(2, 8, 33, seed=1)
    x[2, 3] = torch.nan
    blocks = _blocks(_experts(5, 2, 2), 2, 16)
    found = expert_gated_linear(x, weight, None, blocks, activation, top_k=2).isnan()
    assert found[4:6].all()
    assert found.sum() == 2 * 4


def test_the_rows_of_blocks_follow_the_load_unless_they_must_not() -> None:
    assert block_rows(torch.bfloat16, 8 * 47, 8) == 16
    assert block_rows(torch.bfloat16, 8 * 48, 8) == 128
    assert block_rows(torch.bfloat16, 1, 8, invariant=True) == 128


@pytest.mark.usefixtures("path")
def test_no_tokens() -> None:
    blocks = _blocks(_experts(0, 2, 4), 4, 16)
    assert expert_linear(randn(0, 8), randn(4, 5, 8), None, blocks, top_k=2).shape == (0, 5)


def test_wrong_arguments_are_named() -> None:
    x, weight, bias = randn(3, 8), randn(4, 6, 8), randn(4, 6)
    blocks = _blocks(_experts(3, 2, 4), 4, 16)
    with pytest.raises(ValueError, match="x: must be"):
        expert_linear(x.int(), weight, bias, blocks, top_k=2)
    with pytest.raises(ValueError, match=r"weight: must have shape \[any, any, 8\]"):
        expert_linear(x, weight[..., :4], bias, blocks, top_k=2)
    with pytest.raises(ValueError, match=r"weight: must be torch\.float32"):
        expert_linear(x, weight.half(), bias, blocks, top_k=2)
    with pytest.raises(ValueError, match="weight: must have an even number of rows"):
        expert_gated_linear(x, weight[:, :5], None, blocks, ExpertActivation(), top_k=2)
    with pytest.raises(ValueError, match="weight: must be contiguous"):
        expert_linear(x, weight[:, :5], None, blocks, top_k=2)
    with pytest.raises(ValueError, match="weight: must not be empty"):
        expert_linear(x, weight[:0], None, blocks, top_k=2)
    with pytest.raises(ValueError, match=r"bias: must have shape \[4, 6\]"):
        expert_linear(x, weight, bias[:3], blocks, top_k=2)
    with pytest.raises(ValueError, match="top_k: must be positive"):
        expert_linear(x, weight, bias, blocks, top_k=0)
    codes, _ = _wna16("int8", 144, 1, 4, 6)
    wide = randn(3, 144, dtype=torch.float16)
    with pytest.raises(ValueError, match="x: must be"):
        expert_linear(wide.float(), codes, None, blocks, top_k=2)
    with pytest.raises(ValueError, match=r"x: must have shape \[any, 144\]"):
        expert_linear(wide[:, :16], codes, None, blocks, top_k=2)
    with pytest.raises(ValueError, match="weight: must have shape"):
        expert_linear(wide, formats.expert(codes, 0), None, blocks, top_k=2)
    for wrong in ({"alpha": 0.0}, {"limit": -1.0}, {"offset": math.nan}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ExpertActivation(**wrong)
