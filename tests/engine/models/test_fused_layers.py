"""Layers in one operation compute the very same as their operations one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models import linear_methods, process_weights
from engine.models.decoder import FusedLayers
from engine.models.process_weights import WeightProcessor
from kernels.cpu import linear as panels
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.families import FAMILIES
from tests.factories.forms import runs_panels
from tests.factories.paged_model import PagedModel

pytestmark = pytest.mark.skipif(
    not runs_panels(torch.bfloat16),
    reason="this CPU has no products of ours, or the kernels are not built",
)


@pytest.fixture(autouse=True)
def our_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have our products serve where oneDNN's are faster, too."""
    monkeypatch.setattr(panels, "serves", panels.runs)


TOKENS = [(7 * i + i // 3) % 160 for i in range(90)]


def logits(path: Path, quantization: Any, *, fused: bool) -> Tensor:
    model = PagedModel(path, dtype=torch.bfloat16)
    WeightProcessor(model.model, quantization).finish()
    assert isinstance(model.model.model.fused, FusedLayers) == fused
    return model.logits(TOKENS, chunks=[40, 1, 3, 46])


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen2ForCausalLM", {}),  # biases of q, k and v
        ("Qwen3ForCausalLM", {}),  # norms of queries and keys
        ("MistralForCausalLM", {"sliding_window": 12}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("Ministral3ForCausalLM", dict(FAMILIES["ministral3"][1])),  # scales queries
        ("GlmForCausalLM", {}),  # rotates half of each head, in adjacent pairs
    ],
    ids=str,
)
def test_the_same_as_one_by_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    settings: dict[str, Any],
    quantization: Any,
) -> None:
    write_checkpoint(tmp_path, architecture, **settings)
    found = logits(tmp_path, quantization, fused=True)
    monkeypatch.setattr(process_weights, "can_fuse", lambda layers: False)
    assert torch.equal(found, logits(tmp_path, quantization, fused=False))


def test_layers_with_other_forms_stay(tmp_path: Path) -> None:
    # No whole number of units along the depth of the last projection.
    write_checkpoint(tmp_path, intermediate_size=34)
    found = logits(tmp_path, None, fused=False)
    wanted = PagedModel(tmp_path, dtype=torch.bfloat16).logits(TOKENS, chunks=[40, 1, 3, 46])
    # Each of 13 products, and what is between them, may be rounded to the other side.
    rounding = torch.finfo(torch.bfloat16).eps / 2
    assert (found - wanted).norm() < 13**0.5 * 2 * rounding * wanted.norm()


def test_projections_that_cannot_be_quantised_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_methods, "multiplies_int8", lambda: False)
    write_checkpoint(tmp_path, intermediate_size=34)
    with refuses("unsupported", "quantization", match="int8 .* multiple of 4 .*got 34"):
        logits(tmp_path, "int8", fused=False)
