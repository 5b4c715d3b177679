"""Checkpoints of Qwen VL as Qwen has published them, and as transformers 5 writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.layers.rope import DefaultRope
from engine.models.registry import read_model_spec
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.families import FAMILIES
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import change_config

TOKENS = [(7 * i + i // 3) % 160 for i in range(30)]


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl"])
def test_the_fields_of_the_text_beside_the_vision(family: str, tmp_path: Path) -> None:
    architecture, fields = FAMILIES[family]
    write_checkpoint(tmp_path, architecture, **fields)
    expected = PagedModel(tmp_path).logits(TOKENS)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.pop("text_config")
    del text["rope_parameters"], text["model_type"], text["layer_types"]
    older = {"rope_theta": 100.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    path.write_text(json.dumps({**config, **text, **older}), encoding="utf-8")
    assert torch.equal(PagedModel(tmp_path).logits(TOKENS), expected)


def test_what_is_absent(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["qwen2-vl"]
    write_checkpoint(tmp_path, architecture, **fields)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["text_config"]["rope_parameters"]
    path.write_text(json.dumps(config), encoding="utf-8")
    assert read_model_spec(tmp_path).layers[0].attention.rope == DefaultRope(1e6)


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen3-vl"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_each_prefix(prefix: str, family: str, tmp_path: Path) -> None:
    architecture, fields = FAMILIES[family]
    write_checkpoint(tmp_path, architecture, **fields)
    expected = PagedModel(tmp_path).logits(TOKENS)
    path = tmp_path / "model.safetensors"
    stored = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(path).items()
    }
    renamed = {name.replace("model.", prefix): tensor for name, tensor in stored.items()}
    save_file(renamed, path, {"format": "pt"})
    assert torch.equal(PagedModel(tmp_path).logits(TOKENS), expected)


def test_experts_with_their_inputs_first(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["qwen3-vl-moe"]
    write_checkpoint(tmp_path, architecture, **fields)
    expected = PagedModel(tmp_path).logits(TOKENS)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    experts = [name for name in stored if ".experts." in name]
    assert stored[experts[0]].shape == (6, 64, 48)
    stored |= {name: stored[name].transpose(1, 2).contiguous() for name in experts}
    save_file(stored, path, {"format": "pt"})
    assert torch.equal(PagedModel(tmp_path).logits(TOKENS), expected)


def test_weights_of_experts_that_are_not_normalised_are_refused(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["qwen3-vl-moe"]
    write_checkpoint(tmp_path, architecture, **fields)
    change_config(tmp_path, norm_topk_prob=False)
    with refuses("unsupported", "config.json: text_config: norm_topk_prob"):
        read_model_spec(tmp_path)
