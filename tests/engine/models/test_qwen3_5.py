"""Checkpoints of Qwen 3.5 as Qwen has published them, and as transformers 5 writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.registry import read_model_spec
from tests.factories.checkpoints import write_checkpoint
from tests.factories.exact import ExactModel, assert_as_accurate, decoded_logits
from tests.factories.families import FAMILIES
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import change_config

TOKENS = [(7 * i + i // 3) % 160 for i in range(30)]


def write(family: str, path: Path) -> dict[str, Tensor]:
    """Write a checkpoint of the family; return its tensors."""
    architecture, fields = FAMILIES[family]
    write_checkpoint(path, architecture, **fields)
    return load_file(path / "model.safetensors")


def replace_tensors(path: Path, stored: dict[str, Tensor]) -> None:
    save_file(stored, path / "model.safetensors", {"format": "pt"})


def in_one_tensor(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with all experts of a layer in two, outputs first."""
    found = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in stored if ".experts." in name}:
        count = len([name for name in stored if re.match(rf"{layer}\.experts\.\d+\.down", name)])

        def stack(projection: str, layer: str = layer, count: int = count) -> Tensor:
            names = [f"{layer}.experts.{i}.{projection}_proj.weight" for i in range(count)]
            return torch.stack([stored[name] for name in names])

        found[f"{layer}.experts.gate_up_proj"] = torch.cat((stack("gate"), stack("up")), 1)
        found[f"{layer}.experts.down_proj"] = stack("down")
    return found


@pytest.mark.parametrize("family", ["qwen3.5-moe", "qwen3.5-moe-vision"])
def test_experts_in_one_tensor_give_equal_logits(family: str, tmp_path: Path) -> None:
    stored = write(family, tmp_path)
    expected = PagedModel(tmp_path).logits(TOKENS)
    together = in_one_tensor(stored)
    assert len(together) < len(stored)
    # The layers for speculative decoding may have theirs otherwise.
    together["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(32, 64)
    replace_tensors(tmp_path, together)
    assert torch.equal(PagedModel(tmp_path).logits(TOKENS), expected)


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-vision"])
def test_tensors_of_other_parts_change_nothing(family: str, tmp_path: Path) -> None:
    stored = write(family, tmp_path)
    expected = PagedModel(tmp_path).logits(TOKENS)
    text = {name: tensor for name, tensor in stored.items() if ".visual." not in name}
    assert (len(text) < len(stored)) == (family == "qwen3.5-vision")
    replace_tensors(tmp_path, text)
    assert torch.equal(PagedModel(tmp_path).logits(TOKENS), expected)
    for name in (
        "mtp.fc.weight",
        "mtp.layers.0.self_attn.k_proj.weight",
        "model.visual.blocks.0.attn.qkv.weight",
    ):
        text[name] = torch.ones(4, 4)
    replace_tensors(tmp_path, text)
    assert torch.equal(PagedModel(tmp_path).logits(TOKENS), expected)


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-vision"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_each_prefix_gives_equal_logits(prefix: str, family: str, tmp_path: Path) -> None:
    stored = write(family, tmp_path)
    expected = PagedModel(tmp_path).logits(TOKENS)
    text = {
        name.replace("model.language_model.", "model.").replace("model.", prefix): tensor
        for name, tensor in stored.items()
        if ".visual." not in name
    }
    replace_tensors(tmp_path, text)
    assert torch.equal(PagedModel(tmp_path).logits(TOKENS), expected)


def test_interval_of_attention_in_place_of_layer_types(tmp_path: Path) -> None:
    write("qwen3.5", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["layer_types"] = ["linear_attention", "full_attention"] * 2
    path.write_text(json.dumps(config), encoding="utf-8")
    expected = read_model_spec(tmp_path)
    del config["layer_types"]
    path.write_text(json.dumps({**config, "full_attention_interval": 2}), encoding="utf-8")
    assert read_model_spec(tmp_path) == expected


def test_sigmoid_as_output_gate_matches_transformers(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["qwen3.5"]
    theirs = write_checkpoint(tmp_path, architecture, **fields)
    change_config(tmp_path, output_gate_type="sigmoid")
    exact = ExactModel(theirs)
    for model in (theirs, exact._model):  # whose configuration does not have it
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.norm.activation = "sigmoid"
    logits = PagedModel(tmp_path).logits(TOKENS)
    assert_as_accurate(logits, decoded_logits(theirs, TOKENS), exact.logits(TOKENS))
