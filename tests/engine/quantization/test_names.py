"""What some quantised checkpoints call otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.factories.paged_model import PagedModel
from tests.factories.quantized import change_config, compressed, write_quantized

TOKENS = [(7 * i + i // 3) % 160 for i in range(50)]


def test_the_other_name_of_an_order_by_activations(tmp_path: Path) -> None:
    plain, quantized = write_quantized("compressed-w4a16-actorder", tmp_path)
    order = {"group_size": 16, "actorder": "dynamic"}
    config = compressed("pack-quantized", kind="int", bits=4, strategy="group", **order)
    change_config(quantized, quantization_config=config)
    expected = PagedModel(plain).logits(TOKENS)
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["awq", "bitsandbytes-nf4"])
def test_a_decoder_that_is_stored_alone(name: str, tmp_path: Path) -> None:
    plain, quantized = write_quantized(name, tmp_path, tie_word_embeddings=True)
    for folder in (plain, quantized):
        stored = load_file(folder / "model.safetensors")
        alone = {key.removeprefix("model."): tensor for key, tensor in stored.items()}
        save_file(alone, folder / "model.safetensors")
    expected = PagedModel(plain).logits(TOKENS)
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)
