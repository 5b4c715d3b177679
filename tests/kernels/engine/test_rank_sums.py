"""Ranks that sum by our kernels compute what they compute by sums of torch's collectives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine.ranks import exchange
from engine.ranks.exchange import CollectiveGroup, allocate_store
from kernels import device
from kernels.collectives.peers import Peers
from tests.factories.checkpoints import write_checkpoint
from tests.factories.paged_model import PagedModel
from tests.kernels.collectives.forked_ranks import ForkedRanks
from tests.kernels.kernel_forms import recorded_forms

pytestmark = pytest.mark.skipif(
    not device.INTERPRETED, reason="on a GPU tests/gpu/test_ranks.py tests them"
)

WIDTH = 64  # values of a row, in float32
TOKENS = list(range(20, 45))
CHUNKS = [20, 1, 4]  # whose sums the backend makes, one shot, and two


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_model_over_peers_has_the_bits_of_one_over_the_backend(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's norms lie behind sums: they are not fused with them."""
    write_checkpoint(tmp_path, architecture, hidden_size=WIDTH, head_dim=32)
    monkeypatch.setattr(exchange, "ONE_SHOT_BYTES", 4 * WIDTH)
    monkeypatch.setattr(exchange, "MOST_BYTES", 4 * 4 * WIDTH)
    store = allocate_store()

    def run(peers: Peers) -> tuple[Tensor, Tensor, set[str]]:
        group = CollectiveGroup(
            store, peers.rank, peers.size, device=torch.device("cpu"), patience_s=60.0
        )
        expected = PagedModel(tmp_path, block_size=16, group=group).logits(TOKENS, CHUNKS)
        group.use_peers(peers)
        with recorded_forms() as forms:
            found = PagedModel(tmp_path, block_size=16, group=group).logits(TOKENS, CHUNKS)
        names = {text.partition(":")[0] for text in forms.values()}
        return expected, found, {name for name in names if name.startswith("collectives.")}

    ranks = ForkedRanks(3)
    kernels = {"collectives.rank_sum._sum_kernel"}
    if architecture == "LlamaForCausalLM":
        kernels.add("collectives.rank_sum._norm_kernel")
    for expected, found, names in ranks.run(run):
        assert torch.equal(expected, found)
        assert names == kernels
    os.close(store)
