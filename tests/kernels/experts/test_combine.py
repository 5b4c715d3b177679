import pytest
import torch

from kernels.experts.combine import combine, reference
from tests.kernels.support import DEVICE, assert_close, each_dtype, poison, randn

pytestmark = pytest.mark.usefixtures("path")


def _chosen(num_tokens: int, top_k: int) -> torch.Tensor:
    return torch.ones(num_tokens, top_k, dtype=torch.int32, device=DEVICE)


def test_the_reference_is_the_formula() -> None:
    results, weights = randn(6, 5), randn(2, 3)
    expected = torch.einsum("tkn,tk->tn", results.unflatten(0, (2, 3)), weights)
    assert_close(reference(results, _chosen(2, 3), weights), expected)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 33), (5, 8, 100), (2, 4, 1030)], ids=str)
def test_any_shape(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, top_k, size = shape
    results, weights = randn(num_tokens * top_k, size, dtype=dtype), randn(num_tokens, top_k)
    out = combine(results, _chosen(num_tokens, top_k), weights)
    assert out.dtype == dtype
    assert_close(out, reference(results, _chosen(num_tokens, top_k), weights))


def test_results_of_padding_are_not_read() -> None:
    results, weights, experts = randn(6, 40), randn(3, 2), _chosen(3, 2)
    experts[1] = -1
    weights[1] = 0.0
    poison(results[2:4])
    out = combine(results, experts, weights)
    assert not out[1].any()
    assert out.isfinite().all()
    assert_close(out[0], weights[0, 0] * results[0] + weights[0, 1] * results[1])


def test_results_of_other_ranks_experts_are_not_read() -> None:
    results, weights, experts = randn(6, 40), randn(3, 2), _chosen(3, 2)
    experts[0, 0] = experts[1, 1] = -1
    poison(results[0])
    poison(results[3])
    out = combine(results, experts, weights)
    assert_close(out[0], weights[0, 1] * results[1])
    assert_close(out[1], weights[1, 0] * results[2])
    assert_close(out[2], weights[2, 0] * results[4] + weights[2, 1] * results[5])


def test_no_tokens() -> None:
    assert combine(randn(0, 8), _chosen(0, 2), randn(0, 2)).shape == (0, 8)


def test_wrong_arguments_are_named() -> None:
    results, experts, weights = randn(6, 8), _chosen(3, 2), randn(3, 2)
    with pytest.raises(ValueError, match="results: must be"):
        combine(results.int(), experts, weights)
    with pytest.raises(ValueError, match=r"results: must have shape \[6, any\]"):
        combine(results[:4], experts, weights)
    with pytest.raises(ValueError, match="results: must be contiguous"):
        combine(randn(8, 6).t(), experts.new_ones(3, 2), weights)
    with pytest.raises(ValueError, match=r"experts: must be torch\.int32"):
        combine(results, experts.long(), weights)
    with pytest.raises(ValueError, match=r"weights: must be torch\.float32"):
        combine(results, experts, weights.half())
    with pytest.raises(ValueError, match=r"weights: must have shape \[3, 2\]"):
        combine(results, experts, weights[:2])
