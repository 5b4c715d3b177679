"""The layer of a mixture of experts against transformers', through the kernels."""

import pytest
import torch

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine.layers.experts import Experts
from tests.factories.mixtures import HIDDEN, KINDS, our_layer, reference_block, reference_result
from tests.kernels.support import DEVICE, assert_close


@pytest.mark.parametrize("invariant", [False, True], ids=["by load", "invariant"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_transformers(kind: str, invariant: bool) -> None:
    theirs = reference_block(kind)
    ours = our_layer(kind, theirs, DEVICE)
    assert isinstance(ours.experts, Experts)
    ours.experts.invariant = invariant
    x = torch.randn(19, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert_close(ours(x.to(DEVICE)), reference_result(theirs, x).to(DEVICE))
