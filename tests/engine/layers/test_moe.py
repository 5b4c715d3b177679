"""Mixtures of experts against transformers', in float32."""

import pytest
import torch

from engine.layers.cpu_packed_experts import CpuPackedExperts
from engine.layers.experts import Experts
from kernels.cpu import linear as panels
from tests.factories.mixtures import (
    HIDDEN,
    KINDS,
    NUM_EXPERTS,
    TOP_K,
    our_layer,
    reference_block,
    reference_result,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("packed", [False, True], ids=["torch", "panels"])
@pytest.mark.parametrize("tokens", [1, 45])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_transformers(kind: str, tokens: int, packed: bool) -> None:
    theirs = reference_block(kind)
    ours = our_layer(kind, theirs, CPU)
    if packed:
        if not panels.runs(torch.empty(8, 8), CPU):
            pytest.skip("the products in panels are not built, or not for this CPU")
        assert isinstance(ours.experts, Experts)
        ours.experts = CpuPackedExperts(ours.experts)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(x), reference_result(theirs, x), rtol=1e-5, atol=1e-5)


def test_choices_are_counted() -> None:
    theirs = reference_block("qwen3_moe")
    ours = our_layer("qwen3_moe", theirs, CPU)
    x = torch.randn(45, HIDDEN, generator=torch.Generator().manual_seed(1))
    _, _, chosen = theirs.gate(x)  # type: ignore[operator]
    expected = chosen.flatten().bincount(minlength=NUM_EXPERTS)
    ours(x)
    ours(x)
    assert torch.equal(ours.expert_totals, 2 * expected)


def test_padding_gets_the_shared_expert_alone() -> None:
    ours = our_layer("qwen2_moe", reference_block("qwen2_moe"), CPU)
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([5, -1, 0, -1])
    found = ours(x, slots)
    torch.testing.assert_close(found[::2], ours(x[::2]), rtol=0, atol=1e-6)
    shared = ours.shared_expert
    assert shared is not None
    torch.testing.assert_close(found[1], (ours.shared_expert_gate(x).sigmoid() * shared(x))[1])
    assert ours.expert_totals.sum() == 2 * 2 * TOP_K
