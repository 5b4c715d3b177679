from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.experts.routing import reference, route
from tests.kernels.support import DEVICE, assert_close, each_dtype, padded, randn


def test_the_reference_is_softmax_then_top_k() -> None:
    logits = randn(7, 33)
    probs, chosen = logits.softmax(-1).topk(5)
    experts, weights = reference(logits, 5, normalize=False)
    assert torch.equal(experts.long(), chosen)
    assert_close(weights, probs)
    experts, weights = reference(logits, 5, normalize=True)
    assert torch.equal(experts.long(), chosen)
    assert_close(weights, probs / probs.sum(-1, keepdim=True))


def test_the_reference_chooses_by_score_and_bias_and_weighs_by_score() -> None:
    logits, bias = randn(7, 33), randn(33, seed=1)
    for scores, values in (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid())):
        chosen = (values + bias).topk(5)[1]
        wanted = values.gather(-1, chosen)
        experts, weights = reference(logits, 5, normalize=False, scores=scores, bias=bias)
        assert torch.equal(experts.long(), chosen)
        assert_close(weights, wanted)
        _, weights = reference(logits, 5, normalize=True, scores=scores, bias=bias, scale=2.5)
        assert_close(weights, 2.5 * wanted / wanted.sum(-1, keepdim=True))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 8, 2), (70, 33, 5), (2, 160, 8)], ids=str)
def test_scores_and_biases(
    shape: tuple[int, int, int], biased: bool, normalize: bool, scores: Any
) -> None:
    num_tokens, num_experts, top_k = shape
    bias = randn(num_experts, seed=2) if biased else None
    form = partial(
        route, randn(num_tokens, num_experts) * 3, top_k, normalize=normalize, bias=bias, scale=1.5
    )
    experts, weights = form(scores=scores)
    wanted, sizes = reference(*form.args, **form.keywords, scores=scores)
    assert torch.equal(experts, wanted)
    assert_close(weights, sizes)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_bias_may_choose_experts_that_hardly_count(scores: Any) -> None:
    logits = torch.tensor([[90.0, -40.0, -41.0, 80.0]], device=DEVICE)
    bias = torch.tensor([0.0, 5.0, 5.0, 0.0], device=DEVICE)
    experts, weights = route(logits, 2, normalize=True, scores=scores, bias=bias)
    assert experts.tolist() == [[1, 2]]
    if scores == "softmax":  # whose quotient stays what it is
        assert_close(weights, torch.tensor([[1.0, -1.0]], device=DEVICE).sigmoid())
    assert weights.isfinite().all()


@pytest.mark.usefixtures("path")
@each_dtype
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 8, 2), (130, 33, 5), (65, 60, 4), (2, 512, 10)], ids=str
)
def test_any_shape(shape: tuple[int, int, int], normalize: bool, dtype: torch.dtype) -> None:
    num_tokens, num_experts, top_k = shape
    logits = padded(randn(num_tokens, num_experts, dtype=dtype) * 3)
    experts, weights = route(logits, top_k, normalize=normalize)
    wanted, sizes = reference(logits, top_k, normalize=normalize)
    assert (experts.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(experts, wanted)
    assert_close(weights, sizes)


@pytest.mark.usefixtures("path")
def test_equal_logits_are_taken_by_index() -> None:
    logits = torch.zeros(2, 20, device=DEVICE)
    logits[0, 7] = logits[0, 3] = 1.0
    logits[1, ::2] = -0.0
    experts, weights = route(logits, 4, normalize=True)
    assert experts.tolist() == [[3, 7, 0, 1], [0, 1, 2, 3]]
    assert_close(weights[1], torch.full_like(weights[1], 0.25))


@pytest.mark.usefixtures("path")
@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of infinities
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_what_is_not_finite_shows_and_stays_in_its_row(value: float) -> None:
    logits = randn(3, 9)
    logits[1, 4:] = value
    experts, weights = route(logits, 3, normalize=True)
    assert experts[1].tolist() == [4, 5, 6]
    assert weights[1].isnan().all()
    assert weights[::2].isfinite().all()


@pytest.mark.usefixtures("path")
def test_padding_has_no_experts() -> None:
    logits = randn(4, 9)
    slots = torch.tensor([3, -1, 0, -1], device=DEVICE)
    experts, weights = route(logits, 3, normalize=False, slots=slots)
    wanted, sizes = reference(logits, 3, normalize=False)
    assert (experts[1::2] == -1).all()
    assert not weights[1::2].any()
    assert torch.equal(experts[::2], wanted[::2])
    assert_close(weights[::2], sizes[::2])


@pytest.mark.usefixtures("path")
def test_no_tokens() -> None:
    experts, weights = route(randn(0, 4), 2, normalize=True)
    assert experts.shape == weights.shape == (0, 2)


@settings(max_examples=20, deadline=None)
@given(
    num_tokens=st.integers(1, 9),
    num_experts=st.integers(1, 40),
    levels=st.integers(1, 9),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_both_forms_choose_the_same(
    num_tokens: int, num_experts: int, levels: int, seed: int, data: st.DataObject
) -> None:
    """With few levels of logits, so that many are equal."""
    top_k = data.draw(st.integers(1, num_experts))
    logits = (randn(num_tokens, num_experts, seed=seed) * levels).round()
    experts, weights = route(logits, top_k, normalize=True)
    wanted, sizes = reference(logits, top_k, normalize=True)
    assert torch.equal(experts, wanted)
    assert_close(weights, sizes)


def test_wrong_arguments_are_named() -> None:
    logits = randn(3, 8)
    with pytest.raises(ValueError, match="logits: must be"):
        route(logits.int(), 2, normalize=True)
    with pytest.raises(ValueError, match="logits: must have shape"):
        route(logits[0], 2, normalize=True)
    with pytest.raises(ValueError, match="logits: must be of 1 to 4096 experts"):
        route(randn(1, 4097), 2, normalize=True)
    with pytest.raises(ValueError, match="logits: the last dimension must be contiguous"):
        route(logits.t(), 2, normalize=True)
    for top_k in (0, 9):
        with pytest.raises(ValueError, match="top_k: must be from 1 to 8"):
            route(logits, top_k, normalize=True)
    for bias, message in (
        (torch.zeros(7), "bias: must have shape"),
        (torch.zeros(8).half(), "bias: "),
    ):
        with pytest.raises(ValueError, match=message):
            route(logits, 2, normalize=True, bias=bias.to(DEVICE))
    with pytest.raises(ValueError, match="slots: must have shape"):
        route(logits, 2, normalize=True, slots=torch.zeros(2, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match=r"slots: must be torch\.int64"):
        route(logits, 2, normalize=True, slots=torch.zeros(3, device=DEVICE))
