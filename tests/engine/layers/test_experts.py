"""Experts in panels compute what the plain ones do, and read only those that are chosen."""

import pytest
import torch
from torch import Tensor

from engine.layers.experts import Experts, PanelExperts
from kernels.cpu import linear as panels
from kernels.experts import reference

CPU = torch.device("cpu")
HIDDEN, SIZE, NUM_EXPERTS = 72, 48, 6


def _plain(dtype: torch.dtype) -> Experts:
    if not panels.runs(torch.empty(8, 8, dtype=dtype), CPU):
        pytest.skip("the products in panels are not built, or not for this CPU")
    generator = torch.Generator().manual_seed(0)
    plain = Experts(HIDDEN, SIZE, NUM_EXPERTS, activation="silu", dtype=dtype, device=CPU)
    for parameter in plain.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return plain


def _inputs(tokens: int, dtype: torch.dtype, most: int = NUM_EXPERTS) -> tuple[Tensor, ...]:
    """Return tokens, the experts that they have chosen of the first `most`, and the weights."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.randn(tokens, most, generator=generator).softmax(-1)
    weights, ids = scores.topk(2, dim=-1)
    return torch.randn(tokens, HIDDEN, generator=generator).to(dtype), ids, weights


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_panels_compute_the_same(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    plain = _plain(dtype)
    x, ids, weights = _inputs(tokens, dtype)
    expected = reference(x, plain.gate_up, plain.down, ids, weights, "silu")
    for form in (plain, PanelExperts(plain)):
        out = form(x, ids, weights)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


def test_int8_adds_a_small_error() -> None:
    plain = _plain(torch.bfloat16)
    x, ids, weights = _inputs(40, torch.bfloat16)
    expected = reference(x, plain.gate_up, plain.down, ids, weights, "silu")
    error = PanelExperts(plain, int8=True)(x, ids, weights).float() - expected
    assert 0 < error.square().mean().sqrt() < 0.02 * expected.square().mean().sqrt()


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_a_token_alone_gets_the_same_bits_as_among_others(int8: bool) -> None:
    form = PanelExperts(_plain(torch.bfloat16), int8=int8)
    x, ids, weights = _inputs(33, torch.bfloat16)
    together = form(x, ids, weights)
    for i in range(33):
        assert torch.equal(form(x[i : i + 1], ids[i : i + 1], weights[i : i + 1])[0], together[i])


def test_experts_that_nobody_has_chosen_are_not_read() -> None:
    plain = _plain(torch.bfloat16)
    plain.gate_up[3:] = torch.nan
    plain.down[3:] = torch.nan
    x, ids, weights = _inputs(20, torch.bfloat16, most=3)
    for form in (plain, PanelExperts(plain)):
        assert form(x, ids, weights).isfinite().all()


def test_no_tokens() -> None:
    plain = _plain(torch.float32)
    assert PanelExperts(plain)(*_inputs(0, torch.float32)).shape == (0, HIDDEN)


def test_wrong_arguments_are_named() -> None:
    form = PanelExperts(_plain(torch.float32))
    x, ids, weights = _inputs(3, torch.float32)
    with pytest.raises(ValueError, match="expert_ids: must be below 6"):
        form(x, ids + NUM_EXPERTS, weights)
    with pytest.raises(ValueError, match="weights: must"):
        form(x, ids, weights.double())
    with pytest.raises(ValueError, match="x: must"):
        form(x.half(), ids, weights)
