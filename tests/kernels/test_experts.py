import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.activation import ACTIVATIONS, Activation
from kernels.expert_assignment import assign_to_experts
from kernels.experts import experts, reference
from tests.kernels.support import DEVICE, assert_close, each_dtype, randn, take_path

# Tokens, experts, experts per token, hidden size, size of an expert.
SHAPES = [(1, 1, 1, 8, 4), (3, 8, 2, 33, 20), (40, 4, 4, 64, 64), (17, 60, 6, 70, 31)]


@pytest.fixture(params=["triton", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test on the kernel and on the implementation for CPUs."""
    take_path(request.param, monkeypatch)
    return request.param


def _choice(tokens: int, num_experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, some of them chosen far more often, and their weights."""
    popular = torch.arange(num_experts, device=DEVICE).float() / 8
    scores = randn(tokens, num_experts, seed=seed).float() + popular
    weights, ids = scores.softmax(-1).topk(top_k, dim=-1)
    return ids, weights.contiguous()


def _parts(
    tokens: int, num_experts: int, top_k: int, hidden: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gate_up = randn(num_experts, 2 * size, hidden, dtype=dtype, seed=1) * hidden**-0.5
    down = randn(num_experts, hidden, size, dtype=dtype, seed=2) * size**-0.5
    return randn(tokens, hidden, dtype=dtype), gate_up, down, *_choice(tokens, num_experts, top_k)


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    parts = _parts(*shape, dtype)
    out = experts(*parts, "silu")
    assert out.dtype == dtype
    assert out.shape == parts[0].shape
    # The product between is rounded: as much as the result, again.
    expected = reference(*parts, "silu")
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: Activation) -> None:
    parts = _parts(5, 4, 2, 32, 16, torch.float32)
    assert_close(experts(*parts, activation), reference(*parts, activation))


def test_many_rows_per_expert() -> None:
    parts = _parts(80, 2, 2, 40, 24, torch.float16)  # of the larger blocks
    torch.testing.assert_close(
        experts(*parts, "silu").float(), reference(*parts, "silu"), rtol=4e-3, atol=4e-3
    )


def test_no_tokens() -> None:
    assert experts(*_parts(0, 4, 2, 32, 16, torch.float32), "silu").shape == (0, 32)


def test_wrong_arguments_are_named() -> None:
    x, gate_up, down, ids, weights = _parts(3, 4, 2, 32, 16, torch.float32)
    with pytest.raises(ValueError, match="gate_up: must"):
        experts(x, gate_up[:, :-1], down, ids, weights, "silu")
    with pytest.raises(ValueError, match="down: must"):
        experts(x, gate_up, down.half(), ids, weights, "silu")
    with pytest.raises(ValueError, match="expert_ids: must"):
        experts(x, gate_up, down, ids.int(), weights, "silu")
    with pytest.raises(ValueError, match="weights: must"):
        experts(x, gate_up, down, ids, weights[:2], "silu")


@given(
    tokens=st.integers(1, 40),
    num_experts=st.integers(1, 20),
    top_k=st.integers(1, 4),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=80, deadline=None)
def test_every_row_has_one_place_in_a_block_of_its_expert(
    tokens: int, num_experts: int, top_k: int, block_size: int, seed: int
) -> None:
    top_k = min(top_k, num_experts)
    ids, _ = _choice(tokens, num_experts, top_k, seed)
    rows, block_experts = assign_to_experts(ids, num_experts, block_size)
    assert len(rows) == len(block_experts) * block_size
    num_rows, flat = tokens * top_k, ids.flatten().tolist()
    blocks = zip(rows.view(-1, block_size).tolist(), block_experts.tolist(), strict=True)
    seen: list[int] = []
    for block, expert in blocks:
        own = [row for row in block if row != num_rows]
        assert own == sorted(own)
        assert all(flat[row] == expert for row in own)
        assert expert < num_experts or not own
        seen += own
    assert sorted(seen) == list(range(num_rows))
