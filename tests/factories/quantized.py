"""Checkpoints in the formats of quantised ones, and the same with the weights they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.factories.checkpoints import write_checkpoint
from tests.factories.quantizers import (
    Quantizer,
    awq,
    bitsandbytes_4,
    fp8,
    gptq,
    int8,
    llm_int8,
    mxfp4,
    nvfp4,
    packed_groups,
)

_PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("w1", "w2", "w3"),  # Mixtral's
    *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),  # Falcon's
    *("input_linear", "output_linear"),  # Granite's
    *("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj"),  # of state layers
)


_ACTIVATIONS = {"pack-quantized": None, "nvfp4-pack-quantized": {"dynamic": "local"}}


def compressed(
    layout: str, *, kind: str, bits: int, strategy: str, **weights: Any
) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "type": kind,
                    "num_bits": bits,
                    "strategy": strategy,
                    "symmetric": True,
                    **weights,
                },
                "input_activations": _ACTIVATIONS.get(layout, {"dynamic": True}),
            }
        },
    }


FORMATS: dict[str, tuple[dict[str, Any], Quantizer]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(32)),
    "gptq-4": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        gptq(4, 32, version=1, desc_act=False),
    ),
    "gptq-8-all": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        gptq(8, -1, version=1, desc_act=False),
    ),
    "gptq-v2-desc-act": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 16,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
        },
        gptq(4, 16, version=2, desc_act=True),
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 24], "modules_to_not_convert": None},
        fp8("weight_scale_inv", "block", block=24),
    ),
    "fp8-static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8("weight_scale", "tensor", input_scale_name="input_scale"),
    ),
    "fp8-static-transformers": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8("weight_scale_inv", "tensor", input_scale_name="activation_scale"),
    ),
    "bitsandbytes-8": (
        {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "load_in_4bit": False,
            "llm_int8_skip_modules": None,
            "llm_int8_threshold": 6.0,
        },
        llm_int8,
    ),
    "compressed-fp8-channel": (
        compressed("float-quantized", kind="float", bits=8, strategy="channel"),
        fp8("weight_scale", "channel"),
    ),
    "compressed-fp8-block": (
        compressed(
            "float-quantized", kind="float", bits=8, strategy="block", block_structure=[16, 16]
        ),
        fp8("weight_scale", "block", block=16),
    ),
    "compressed-int8": (
        compressed("int-quantized", kind="int", bits=8, strategy="channel"),
        int8(per_channel=True),
    ),
    "compressed-int8-tensor": (
        compressed("int-quantized", kind="int", bits=8, strategy="tensor"),
        int8(per_channel=False),
    ),
    "compressed-w4a16": (
        compressed("pack-quantized", kind="int", bits=4, strategy="group", group_size=32),
        packed_groups(4, 32),
    ),
    "compressed-w8a16-channel": (
        compressed("pack-quantized", kind="int", bits=8, strategy="channel"),
        packed_groups(8, None),
    ),
    "compressed-w4a16-asymmetric": (
        compressed(
            "pack-quantized", kind="int", bits=4, strategy="group", group_size=16, symmetric=False
        ),
        packed_groups(4, 16, has_zeros=True),
    ),
    "compressed-w8a16-asymmetric-channel": (
        compressed("pack-quantized", kind="int", bits=8, strategy="channel", symmetric=False),
        packed_groups(8, None, has_zeros=True),
    ),
    "compressed-w4a16-actorder": (
        compressed(
            "pack-quantized", kind="int", bits=4, strategy="group", group_size=16, actorder="group"
        ),
        packed_groups(4, 16, has_index=True),
    ),
}
_4_BIT = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
_NVFP4 = compressed(
    "nvfp4-pack-quantized", kind="float", bits=4, strategy="tensor_group", group_size=16
)
FORMATS |= {
    "bitsandbytes-nf4": (
        {**_4_BIT, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
        bitsandbytes_4("nf4", nested=False),
    ),
    "bitsandbytes-nf4-nested": (
        {**_4_BIT, "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": True},
        bitsandbytes_4("nf4", nested=True),
    ),
    "bitsandbytes-fp4": (
        {**_4_BIT, "bnb_4bit_quant_type": "fp4"},
        bitsandbytes_4("fp4", nested=False),
    ),
    "modelopt-fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        fp8("weight_scale", "tensor", input_scale_name="input_scale"),
    ),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        nvfp4(compressed=False),
    ),
    "compressed-nvfp4": (_NVFP4, nvfp4(compressed=True)),
}
MXFP4: tuple[dict[str, Any], Quantizer] = (
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    mxfp4,
)


def write_quantized(
    name: str,
    folder: Path,
    architecture: str = "Qwen2ForCausalLM",
    *,
    floats_in: str | None = None,
    **settings: Any,
) -> tuple[Path, Path]:
    """Write a checkpoint in format `name`, and the same with the weights that it stands for.

    Args:
        name: key of `FORMATS`, or `mxfp4`, which only experts have.
        floats_in: a module, whose projections stay floats; the configuration does not name it.

    Returns:
        The two folders.
    """
    config, quantize = MXFP4 if name == "mxfp4" else FORMATS[name]
    plain, quantized = folder / "plain", folder / "quantized"
    write_checkpoint(plain, architecture, **settings)
    shutil.copytree(plain, quantized)
    draw = torch.Generator().manual_seed(len(name))
    floats = load_file(plain / "model.safetensors")
    stored = dict(floats)
    for full_name, tensor in floats.items():
        module = full_name.removesuffix(".weight")
        if module.rpartition(".")[2] not in _PROJECTIONS or floats_in in module.split("."):
            continue
        if tensor.dim() == 3:  # all experts, inputs first
            _, columns, rows = tensor.shape
            experts = [quantize(rows, columns, draw) for _ in tensor]
            weights = torch.stack([weight.t() for _, weight in experts])
            floats[full_name] = weights.float().contiguous()
            del stored[full_name]
            for key in experts[0].tensors:
                parts = [tensors[key] for tensors, _ in experts]
                stored[f"{full_name}_{key}"] = torch.stack(parts)
            continue
        if name == "mxfp4":
            continue
        tensors, weight = quantize(*tensor.shape, draw)
        floats[full_name] = weight.float().contiguous()
        del stored[full_name]
        stored |= {f"{module}.{key}": value for key, value in tensors.items()}
    save_file(floats, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    change_config(quantized, quantization_config=config)
    return plain, quantized


def change_config(folder: Path, **fields: Any) -> None:
    """Set fields of `config.json`."""
    path = folder / "config.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**found, **fields}), encoding="utf-8")
