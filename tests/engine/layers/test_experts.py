"""Experts in all forms against exact products."""

import pytest
import torch
from torch import Tensor

from engine.layers.cpu_packed_experts import CpuPackedExperts
from engine.layers.experts import Experts
from engine.layers.linear.cpu_packed import CpuPackedLinear
from kernels.cpu import linear as panels
from kernels.cpu.activation import ACTIVATIONS, Activation
from kernels.experts.activation import ExpertActivation

CPU = torch.device("cpu")
HIDDEN, SIZE, NUM_EXPERTS, TOP_K = 72, 48, 6, 3
SILU = ExpertActivation()
GPT_OSS = ExpertActivation(alpha=1.702, limit=0.7, offset=1.0)  # a limit that values reach
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def _plain(dtype: torch.dtype, activation: ExpertActivation = SILU, bias: bool = False) -> Experts:
    if not panels.runs(torch.empty(8, 8, dtype=dtype), CPU):
        pytest.skip("the products in panels are not built, or not for this CPU")
    generator = torch.Generator().manual_seed(0)
    plain = Experts(
        HIDDEN, SIZE, NUM_EXPERTS, activation=activation, bias=bias, dtype=dtype, device=CPU
    )
    for parameter in plain.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return plain


def _inputs(
    tokens: int, dtype: torch.dtype, most: int = NUM_EXPERTS
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, the experts that they have chosen of the first `most`, and the weights."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.randn(tokens, most, generator=generator).softmax(-1)
    weights, chosen = scores.topk(TOP_K, dim=-1)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    return x.to(dtype), chosen.int(), weights


def _totals() -> Tensor:
    return torch.zeros(NUM_EXPERTS, dtype=torch.int64)


def _exact(plain: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute token by token, in float64 but for the activation."""
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    gate_up_bias, down_bias = (
        torch.zeros(()).expand(NUM_EXPERTS, 1) if bias is None else bias
        for bias in (plain.gate_up_bias, plain.down_bias)
    )
    for token, experts in enumerate(chosen.tolist()):
        for weight, expert in zip(weights[token].double(), experts, strict=True):
            product = plain.gate_up[expert].double() @ x[token].double() + gate_up_bias[expert]
            inner = plain.activation(product[::2], product[1::2]).double()
            out[token] += weight * (plain.down[expert].double() @ inner + down_bias[expert])
    return out


@pytest.mark.usefixtures("threads")
@each_dtype
@pytest.mark.parametrize(
    ("activation", "bias"), [(SILU, False), (GPT_OSS, True)], ids=["silu", "gpt-oss"]
)
@pytest.mark.parametrize("tokens", [1, 2, 33, 130])
def test_all_forms_compute_the_same(
    tokens: int, activation: ExpertActivation, bias: bool, dtype: torch.dtype
) -> None:
    plain = _plain(dtype, activation, bias)
    inputs = _inputs(tokens, dtype)
    expected = _exact(plain, *inputs)
    for form in (plain, CpuPackedExperts(plain)):
        totals = _totals()
        out = form(*inputs, totals)
        assert out.dtype == dtype
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(totals, inputs[1].long().flatten().bincount(minlength=NUM_EXPERTS))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: Activation) -> None:
    plain = _plain(torch.float32, ExpertActivation(kind))
    inputs = _inputs(5, torch.float32)
    for form in (plain, CpuPackedExperts(plain)):
        expected = _exact(plain, *inputs)
        torch.testing.assert_close(form(*inputs, _totals()).double(), expected, rtol=0, atol=2e-5)


@each_dtype
def test_int8_is_that_of_projections(dtype: torch.dtype) -> None:
    """To the last bit that of each expert's projections alone, summed in the same order."""
    plain = _plain(dtype)
    x, chosen, weights = _inputs(40, dtype)
    found = CpuPackedExperts(plain, int8=True)(x, chosen, weights, _totals())
    each = torch.zeros(NUM_EXPERTS, 40, HIDDEN)
    for expert in range(NUM_EXPERTS):
        halves = torch.cat((plain.gate_up[expert, ::2], plain.gate_up[expert, 1::2]))
        gated = CpuPackedLinear(halves, None, int8=True, activation="silu")
        down = CpuPackedLinear(plain.down[expert], None, int8=True)
        each[expert] = down(gated(x)).float()
    sums = torch.zeros(40, HIDDEN)
    for k in range(TOP_K):
        sums += weights[:, k, None] * each[chosen[:, k].long(), torch.arange(40)]
    assert torch.equal(found, sums.to(dtype))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_a_token_alone_gets_the_same_bits_as_among_others(int8: bool) -> None:
    form = CpuPackedExperts(_plain(torch.bfloat16), int8=int8)
    x, chosen, weights = _inputs(40, torch.bfloat16)
    together = form(x, chosen, weights, _totals())
    for part in (*(slice(i, i + 1) for i in range(40)), slice(3, 30)):
        alone = form(x[part], chosen[part], weights[part], _totals())
        assert torch.equal(alone, together[part])


def test_experts_that_nobody_has_chosen_are_not_read() -> None:
    plain = _plain(torch.bfloat16)
    plain.gate_up[3:] = torch.nan
    plain.down[3:] = torch.nan
    inputs = _inputs(20, torch.bfloat16, most=3)
    for form in (plain, CpuPackedExperts(plain)):
        assert form(*inputs, _totals()).isfinite().all()


@each_dtype
def test_padding_is_zero_and_not_counted(dtype: torch.dtype) -> None:
    plain = _plain(dtype)
    x, chosen, weights = _inputs(9, dtype)
    padded, unweighted = chosen.clone(), weights.clone()
    padded[2::3], unweighted[2::3], x[2::3] = -1, 0.0, torch.nan
    for form in (plain, CpuPackedExperts(plain)):
        totals = _totals()
        out = form(x, padded, unweighted, totals)
        assert not out[2::3].any()
        assert out.isfinite().all()
        assert totals.sum() == 6 * TOP_K


@each_dtype
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    plain = _plain(dtype, GPT_OSS)
    x, chosen, weights = _inputs(9, dtype)
    x[4, 7] = torch.nan
    for form in (plain, CpuPackedExperts(plain)):
        found = form(x, chosen, weights, _totals()).isfinite()
        assert not found[4].any()
        assert found.sum() == 8 * HIDDEN


def test_no_tokens() -> None:
    plain = _plain(torch.float32)
    for form in (plain, CpuPackedExperts(plain)):
        assert form(*_inputs(0, torch.float32), _totals()).shape == (0, HIDDEN)


@pytest.mark.parametrize("expert", [-2, NUM_EXPERTS])
def test_packed_experts_index_just_outside_is_refused(expert: int) -> None:
    """The kernel would read the weights of an expert that there is not."""
    form = CpuPackedExperts(_plain(torch.float32))
    x, chosen, weights = _inputs(3, torch.float32)
    chosen[1, 2] = expert
    with pytest.raises(ValueError, match="experts: must be from -1 to 5"):
        form(x, chosen, weights, _totals())


def test_wrong_arguments_are_named() -> None:
    form = CpuPackedExperts(_plain(torch.float32))
    x, chosen, weights = _inputs(3, torch.float32)
    with pytest.raises(ValueError, match="experts: must be from -1 to 5"):
        form(x, chosen + NUM_EXPERTS, weights, _totals())
    with pytest.raises(ValueError, match=r"experts: must be torch\.int32"):
        form(x, chosen.long(), weights, _totals())
    with pytest.raises(ValueError, match="weights: must"):
        form(x, chosen, weights.double(), _totals())
    with pytest.raises(ValueError, match="x: must"):
        form(x.double(), chosen, weights, _totals())
    with pytest.raises(ValueError, match=r"gate_up: must be torch\.bfloat16"):
        form(x.bfloat16(), chosen, weights, _totals())
    with pytest.raises(ValueError, match="gate_up: must have shape"):
        form(x, chosen, weights, torch.zeros(NUM_EXPERTS + 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"totals: must be torch\.int64"):
        form(x, chosen, weights, _totals().int())
