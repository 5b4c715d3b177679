"""Checkpoints of GPTQ as AutoGPTQ writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.quantization.gptq import Gptq
from tests.factories.families import FAMILIES
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import write_quantized

TOKENS = [(7 * i + i // 3) % 160 for i in range(50)]


def _add_biases(quantized: Path, value: float) -> None:
    """Give each projection without a bias one, as AutoGPTQ does."""
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".qweight")]:
        bias = torch.full((tensors[name].shape[1],), value, dtype=torch.float16)
        tensors.setdefault(f"{name.removesuffix('.qweight')}.bias", bias)
    save_file(tensors, path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3-moe"])
def test_biases_of_zeros_that_the_model_has_no_place_for(family: str, tmp_path: Path) -> None:
    architecture, fields = FAMILIES[family]
    plain, quantized = write_quantized("gptq-4", tmp_path, architecture, **fields)
    _add_biases(quantized, 0.0)
    expected = PagedModel(plain).logits(TOKENS)
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("value", [1e-3, float("nan")])
def test_other_biases_that_the_model_has_no_place_for(value: float, tmp_path: Path) -> None:
    _, quantized = write_quantized("gptq-4", tmp_path)
    _add_biases(quantized, value)
    with pytest.raises(CheckpointError, match=r"proj\.bias: is not a tensor of this"):
        PagedModel(quantized)


def test_zero_stored_as_all_bits_is_no_zero_at_all() -> None:
    """The first version of the layout stores zeros less one: of 0 that is the largest."""
    form = Gptq(4, 32, zero_offset=1, desc_act=False)
    tensors = {
        "qweight": torch.full((4, 8), 0x76543210, dtype=torch.int32),
        "qzeros": torch.full((1, 1), -1, dtype=torch.int32),
        "scales": torch.ones(1, 8),
        "g_idx": torch.zeros(32, dtype=torch.int32),
    }
    expected = torch.arange(8.0).repeat(4).expand(8, 32)
    assert torch.equal(form.dequantize(tensors), expected)
    integers = form.integers(tensors)
    assert integers is not None
    assert torch.equal(integers.dequantized(), expected)
