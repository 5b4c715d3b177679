"""Formats of 4-bit floats and tables: bitsandbytes' NF4 and FP4, and NVFP4.

`references.safetensors` holds small weights that the formats' own packages have quantised, and what
these make of them again, in float32: bitsandbytes 0.50.2, ModelOpt 0.47.0 and compressed-tensors
0.20.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError, TridentError, UnsupportedError
from engine.quantization.format import Format
from engine.quantization.nvfp4 import Nvfp4
from engine.quantization.registry import read_quantization
from tests.factories.families import FAMILIES
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import FORMATS, change_config, write_quantized

REFERENCES = Path(__file__).with_name("references.safetensors")
TOKENS = [(7 * i + i // 3) % 160 for i in range(50)]
PLACE = "model.layers.2.mlp.up_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


def _reference(case: str) -> tuple[dict[str, Tensor], Tensor]:
    found = {
        name.removeprefix(f"{case}."): tensor
        for name, tensor in load_file(REFERENCES).items()
        if name.startswith(f"{case}.")
    }
    return found, found.pop("expected")


def _dequantized(fmt: Format, tensors: dict[str, Tensor], expected: Tensor) -> Tensor:
    """Return the weight after a look at the shapes and types that the format asks for."""
    rows, columns = expected.shape
    stored = fmt.tensors(rows, columns)
    assert stored.keys() == tensors.keys()
    for name, each in stored.items():
        assert tensors[name].dtype == each.dtype
        tensors[name] = tensors[name].view(each.shape)
    return fmt.dequantize(tensors)


@pytest.mark.parametrize("case", ["nf4", "nf4-nested", "fp4", "fp4-nested"])
def test_what_bitsandbytes_writes(case: str, tmp_path: Path) -> None:
    tensors, expected = _reference(case)
    stored = {f"{PLACE}.{name}": tensor for name, tensor in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    checkpoint = read_quantization(tmp_path)
    assert checkpoint is not None
    assert checkpoint.label == f"bitsandbytes, {case.removesuffix('-nested')}"
    fmt = checkpoint.format_of(PLACE, is_expert=False)
    assert fmt is not None
    assert torch.equal(_dequantized(fmt, tensors, expected), expected)


@pytest.mark.parametrize(
    ("case", "fmt"),
    [
        ("modelopt-nvfp4", Nvfp4("weight", "weight_scale_2", None, divides=False)),
        ("compressed-nvfp4", Nvfp4("weight_packed", "weight_global_scale", None, divides=True)),
    ],
)
def test_what_writers_of_nvfp4_write(case: str, fmt: Format) -> None:
    tensors, expected = _reference(case)
    assert torch.equal(_dequantized(fmt, tensors, expected), expected)


def test_experts_in_nf4_are_refused(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["qwen3-moe"]
    _, quantized = write_quantized("bitsandbytes-nf4", tmp_path, architecture, **fields)
    with pytest.raises(UnsupportedError, match="load_in_4bit: experts are not supported"):
        PagedModel(quantized)


@pytest.mark.parametrize("name", ["modelopt-fp8", "modelopt-nvfp4"])
def test_the_older_file_of_modelopt(name: str, tmp_path: Path) -> None:
    plain, quantized = write_quantized(name, tmp_path)
    left_out = [f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up")]
    floats = load_file(plain / "model.safetensors")
    stored = load_file(quantized / "model.safetensors")
    for module in left_out:
        for key in [key for key in stored if key.startswith(module)]:
            del stored[key]
        stored[f"{module}.weight"] = floats[f"{module}.weight"]
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    change_config(quantized, quantization_config=None)
    found = {
        "quant_algo": FORMATS[name][0]["quant_algo"],
        "exclude_modules": ["lm_head", "*layers.1.mlp.gate*", "model.*.1.mlp.up_proj"],
    }
    path = quantized / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": found}))
    expected = PagedModel(plain).logits(TOKENS)
    torch.testing.assert_close(PagedModel(quantized).logits(TOKENS), expected, rtol=0, atol=2e-3)
    path.write_text(json.dumps({"quantization": {**found, "quant_algo": "MIXED_PRECISION"}}))
    message = r"hf_quant_config\.json: quantization: quant_algo: 'MIXED_PRECISION'"
    with pytest.raises(UnsupportedError, match=message):
        PagedModel(quantized)
    path.write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert read_quantization(quantized) is None


def _state(**changes: object) -> Callable[[Tensor], Tensor]:
    """Return a change of fields of the JSON that a tensor holds; `None` takes one away."""

    def change(tensor: Tensor) -> Tensor:
        fields = {**json.loads(bytes(tensor.tolist())), **changes}
        return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)

    return change


def _set_to(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        wide = tensor.float()
        wide.view(-1)[0] = value
        return wide.to(tensor.dtype)

    return change


BROKEN: dict[str, tuple[str, str, Callable[[Tensor], Tensor] | None, str]] = {
    "no state": ("bitsandbytes-nf4", STATE, None, f"{PLACE}.{STATE} or .*: missing from"),
    "no json": (
        "bitsandbytes-nf4",
        STATE,
        lambda tensor: tensor[:-1],
        rf"model\.safetensors: {PLACE}.{STATE}: is not valid JSON",
    ),
    "no object": (
        "bitsandbytes-nf4",
        STATE,
        lambda tensor: torch.tensor([91, 93], dtype=torch.uint8),
        f"{PLACE}.{STATE}: must hold one JSON object",
    ),
    "table": ("bitsandbytes-nf4", STATE, _state(quant_type="af4"), "quant_type: 'af4'"),
    "block": ("bitsandbytes-nf4", STATE, _state(blocksize=0), "blocksize: must be an integer"),
    "another block": (
        "bitsandbytes-nf4",
        STATE,
        _state(blocksize=128),
        rf"{PLACE}.weight.absmax: has shape \[96\] in model.safetensors, but .* asks for \[48\]",
    ),
    "another shape": (
        "bitsandbytes-nf4",
        STATE,
        _state(shape=[64, 96]),
        rf"{STATE}: shape: is \[64, 96\], but config.json asks for \[96, 64\]",
    ),
    "no offset": (
        "bitsandbytes-nf4-nested",
        STATE,
        _state(nested_offset=None),
        f"{PLACE}.{STATE}: nested_offset: is missing",
    ),
    "no scales": (
        "bitsandbytes-nf4",
        "weight.absmax",
        None,
        f"{PLACE}.weight.absmax: missing from model.safetensors",
    ),
    "bytes for floats": (
        "bitsandbytes-nf4",
        "weight.absmax",
        lambda tensor: tensor.to(torch.uint8),
        "weight.absmax: has dtype U8 in model.safetensors",
    ),
    "infinite scale": (
        "bitsandbytes-nf4",
        "weight.absmax",
        _set_to(torch.inf),
        f"{PLACE}.weight.absmax: a value is not finite",
    ),
    "state of floats": (
        "bitsandbytes-nf4",
        STATE,
        lambda tensor: tensor.float(),
        f"{PLACE}.{STATE}: must be of uint8",
    ),
    "nested nan": (
        "bitsandbytes-nf4-nested",
        "weight.nested_absmax",
        _set_to(torch.nan),
        f"{PLACE}.weight.nested_absmax: a value is not finite",
    ),
    "table of infinity": (
        "bitsandbytes-nf4",
        "weight.quant_map",
        _set_to(torch.inf),
        f"{PLACE}.weight.quant_map: a value is not finite",
    ),
    "no scales of blocks": (
        "modelopt-nvfp4",
        "weight_scale",
        None,
        f"{PLACE}.weight_scale: missing from model.safetensors",
    ),
    "scales of blocks": (
        "modelopt-nvfp4",
        "weight_scale",
        lambda tensor: tensor[:, :3].contiguous(),
        rf"{PLACE}.weight_scale: has shape \[96, 3\] .* asks for \[96, 4\]",
    ),
    "nan of a block": (
        "modelopt-nvfp4",
        "weight_scale",
        _set_to(torch.nan),
        f"{PLACE}.weight_scale: a scale is negative or NaN",
    ),
    "scale of all": (
        "compressed-nvfp4",
        "weight_global_scale",
        _set_to(0),
        f"{PLACE}.weight_global_scale: a scale is 0",
    ),
    "floats for bytes": (
        "compressed-nvfp4",
        "weight_packed",
        lambda tensor: tensor.float(),
        "weight_packed: has dtype F32 .* asks for uint8",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensors_are_named(case: str, tmp_path: Path) -> None:
    name, key, change, message = BROKEN[case]
    _, quantized = write_quantized(name, tmp_path)
    stored = load_file(quantized / "model.safetensors")
    tensor = stored.pop(f"{PLACE}.{key}")
    if change is not None:
        stored[f"{PLACE}.{key}"] = change(tensor)
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(TridentError, match=message):
        PagedModel(quantized)


@pytest.mark.parametrize("name", ["bitsandbytes-nf4", "modelopt-nvfp4"])
def test_truncated_files_are_named(name: str, tmp_path: Path) -> None:
    _, quantized = write_quantized(name, tmp_path)
    path = quantized / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: corrupt or truncated"):
        PagedModel(quantized)


def test_blocks_of_nvfp4_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, quantized = write_quantized("modelopt-nvfp4", tmp_path)
    change_config(quantized, intermediate_size=72)
    with pytest.raises(
        UnsupportedError, match="in_features 72 is not a multiple of the block size 16"
    ):
        PagedModel(quantized)
