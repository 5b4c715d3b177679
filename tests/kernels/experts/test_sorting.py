import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.experts.sorting import ExpertBlocks, most_blocks, reference, sort_by_expert
from tests.kernels.support import DEVICE


def _experts(num_tokens: int, top_k: int, num_experts: int, seed: int = 0) -> Tensor:
    """Return choices that differ in each token, and of some tokens none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    chosen = scores.argsort(-1)[:, :top_k].to(torch.int32)
    chosen[torch.rand(num_tokens, generator=generator) < 0.1] = -1
    return chosen.contiguous().to(DEVICE)


def _totals(num_experts: int) -> Tensor:
    return torch.arange(num_experts, device=DEVICE) * 10


def _choices_of(experts: Tensor, blocks: ExpertBlocks, num_experts: int) -> dict[int, list[int]]:
    """Return each expert's choices, after checking that its blocks are adjacent and full."""
    found: dict[int, list[int]] = {expert: [] for expert in range(num_experts)}
    owners = blocks.experts.tolist()
    used = [owner for owner in owners if owner >= 0]
    assert owners == used + [-1] * (len(owners) - len(used))
    assert used == sorted(used)
    for owner, choices in zip(owners, blocks.choices.tolist(), strict=True):
        real = [choice for choice in choices if choice < experts.numel()]
        assert choices == real + [experts.numel()] * (len(choices) - len(real))
        if owner < 0:
            assert not real
            continue
        assert real
        assert len(found[owner]) % len(choices) == 0, "a block that is not the last has room"
        found[owner] += real
    return found


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 2, 8), (9, 4, 5), (20, 8, 33), (400, 3, 4)], ids=str
)
def test_each_choice_is_in_a_block_of_its_expert(
    shape: tuple[int, int, int], block_rows: int
) -> None:
    num_tokens, top_k, num_experts = shape
    experts = _experts(num_tokens, top_k, num_experts)
    totals = _totals(num_experts)
    blocks = sort_by_expert(experts, totals, block_rows)
    found = _choices_of(experts, blocks, num_experts)
    flat = experts.flatten().tolist()
    assert found == {
        expert: [i for i, owner in enumerate(flat) if owner == expert]
        for expert in range(num_experts)
    }
    added = totals - _totals(num_experts)
    assert added.tolist() == [len(found[expert]) for expert in range(num_experts)]


@settings(max_examples=15, deadline=None)
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 20),
    block_rows=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_both_forms_sort_alike(
    num_tokens: int, num_experts: int, block_rows: int, seed: int, data: st.DataObject
) -> None:
    experts = _experts(num_tokens, data.draw(st.integers(1, num_experts)), num_experts, seed)
    totals, others = _totals(num_experts), _totals(num_experts)
    found = sort_by_expert(experts, totals, block_rows)
    wanted = reference(experts, others, block_rows)
    assert torch.equal(found.experts, wanted.experts)
    assert torch.equal(found.choices, wanted.choices)
    assert torch.equal(totals, others)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=9), st.sampled_from([1, 4, 16]))
def test_no_choice_of_experts_needs_more_blocks(counts: list[int], block_rows: int) -> None:
    needed = sum(-(-count // block_rows) for count in counts)
    assert needed <= most_blocks(sum(counts), len(counts), block_rows)


def test_that_many_blocks_can_be_needed() -> None:
    assert most_blocks(0, 8, 16) == 0
    assert most_blocks(3, 8, 16) == 3
    assert most_blocks(8 + 16, 8, 16) == 9


def test_wrong_arguments_are_named() -> None:
    experts, totals = _experts(3, 2, 4), _totals(4)
    with pytest.raises(ValueError, match="experts: must have shape"):
        sort_by_expert(experts[0], totals, 16)
    with pytest.raises(ValueError, match=r"experts: must be torch\.int32"):
        sort_by_expert(experts.long(), totals, 16)
    with pytest.raises(ValueError, match="experts: must be contiguous"):
        sort_by_expert(experts.t(), totals, 16)
    with pytest.raises(ValueError, match=r"totals: must be torch\.int64"):
        sort_by_expert(experts, totals.int(), 16)
    with pytest.raises(ValueError, match="totals: must not be empty"):
        sort_by_expert(experts, totals[:0], 16)
    for rows in (0, 24):
        with pytest.raises(ValueError, match="block_rows: must be a power of two"):
            sort_by_expert(experts, totals, rows)
