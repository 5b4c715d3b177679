"""Where the tensors of quantised checkpoints are found, and which of them may be 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from tests.factories.families import FAMILIES
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import change_config, write_quantized

TOKENS = [(7 * i + i // 3) % 160 for i in range(50)]
PLACE = "model.layers.2.mlp.up_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("bitsandbytes-nf4", "weight.absmax"),
        ("bitsandbytes-nf4-nested", "weight.nested_absmax"),
        ("bitsandbytes-8", "SCB"),
    ],
)
def test_scales_of_weights_of_zeros_are_0(name: str, scale: str, tmp_path: Path) -> None:
    plain, quantized = write_quantized(name, tmp_path)
    floats = load_file(plain / "model.safetensors")
    stored = load_file(quantized / "model.safetensors")
    stored[f"{PLACE}.{scale}"].zero_()
    floats[f"{PLACE}.weight"].zero_()
    if name.endswith("nested"):
        state = json.loads(bytes(stored[f"{PLACE}.{STATE}"].tolist()))
        assert state["nested_offset"] > 0
        state["nested_offset"] = 0.0
        written = list(json.dumps(state).encode())
        stored[f"{PLACE}.{STATE}"] = torch.tensor(written, dtype=torch.uint8)
    save_file(floats, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    expected = PagedModel(plain).logits(TOKENS)
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("name", ["bitsandbytes-nf4", "modelopt-nvfp4"])
def test_each_prefix_of_a_family_is_looked_up(name: str, prefix: str, tmp_path: Path) -> None:
    architecture, fields = FAMILIES["gemma3"]
    plain, quantized = write_quantized(name, tmp_path, architecture, **fields)
    expected = PagedModel(plain).logits(TOKENS)
    stored = load_file(quantized / "model.safetensors")
    renamed = {prefix + key.removeprefix("model."): value for key, value in stored.items()}
    save_file(renamed, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {key: config[key] for key in config if key != "quantization_config"},
        "quantization_config": {
            **config["quantization_config"],
            "modules_to_not_convert": [f"{prefix}layers.1.mlp"],
        },
    }
    for part in ("gate", "up", "down"):
        module = f"layers.1.mlp.{part}_proj"
        for key in [key for key in renamed if key.startswith(prefix + module)]:
            del renamed[key]
        renamed[f"{prefix}{module}.weight"] = load_file(plain / "model.safetensors")[
            f"model.{module}.weight"
        ]
    save_file(renamed, quantized / "model.safetensors", {"format": "pt"})
    (quantized / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)


def test_files_beside_those_of_the_index_are_not_read(tmp_path: Path) -> None:
    _, quantized = write_quantized("bitsandbytes-nf4", tmp_path)
    expected = PagedModel(quantized).logits(TOKENS)
    (quantized / "consolidated.safetensors").write_bytes(b"not one of the checkpoint's")
    assert torch.equal(PagedModel(quantized).logits(TOKENS), expected)
    stored = load_file(quantized / "model.safetensors")
    names = sorted(stored)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"part-{i}.safetensors"
        save_file({name: stored[name] for name in part}, quantized / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (quantized / "model.safetensors").unlink()
    index = quantized / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(PagedModel(quantized).logits(TOKENS), expected)
    for key in (f"{PLACE}.{STATE}", f"{PLACE}.weight.absmax"):
        fewer = {name: file for name, file in weight_map.items() if name != key}
        index.write_text(json.dumps({"weight_map": fewer}))
        file = quantized / weight_map[key]
        kept = load_file(file)
        save_file({name: kept[name] for name in kept if name != key}, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"missing from model\.safetensors\.index\.json"):
            PagedModel(quantized)
        save_file(kept, file, {"format": "pt"})


def test_what_stores_experts_does_not_store_linears(tmp_path: Path) -> None:
    _, quantized = write_quantized("awq", tmp_path)
    change_config(quantized, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: missing from model.safetensors"):
        PagedModel(quantized)
