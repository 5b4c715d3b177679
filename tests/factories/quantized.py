"""Quantised checkpoints, written from the published layouts, and the weights that they stand for.

Steps, zeros and scales are drawn first. From them follow both the packed tensors and, without any
packing, the float weights: who reads the packed tensors wrongly gets others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.factories.checkpoints import write_checkpoint

_PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("w1", "w2", "w3"),  # Mixtral's
    *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),  # Falcon's
)


class Quantized(NamedTuple):
    """The tensors of a projection, by the last part of their names, and its weight."""

    tensors: dict[str, Tensor]
    weight: Tensor


Quantizer = Callable[[int, int, torch.Generator], Quantized]


def pack_words(values: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return int32 words of consecutive `values` along `dim`, the first in the lowest bits.

    Args:
        order: which of the values of a word is in its lowest bits, in the next ones ...
    """
    per_word = 32 // bits
    moved = values.movedim(dim, -1).to(torch.int64)
    groups = moved.reshape(*moved.shape[:-1], -1, per_word)
    words = torch.zeros(groups.shape[:-1], dtype=torch.int64)
    for place, value in enumerate(order or range(per_word)):
        words |= groups[..., value] << (bits * place)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def _grouped(
    rows: int, columns: int, bits: int, group_of: Tensor, draw: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return steps [N, K], zeros and scales [N, groups], and the weight; signs are balanced."""
    groups = int(group_of.max()) + 1
    steps = torch.randint(0, 2**bits, (rows, columns), generator=draw)
    zeros = torch.randint(2 ** (bits - 1) - 2, 2 ** (bits - 1) + 2, (rows, groups), generator=draw)
    usual = 0.6 * columns**-0.5 / 2 ** (bits - 2)  # as large as other weights
    scales = ((0.5 + torch.rand(rows, groups, generator=draw)) * usual).half().float()
    weight = (steps - zeros[:, group_of]) * scales[:, group_of]
    return steps, zeros, scales, weight


def awq(group_size: int) -> Quantizer:
    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        group_of = torch.arange(columns) // group_size
        steps, zeros, scales, weight = _grouped(rows, columns, 4, group_of, draw)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": pack_words(steps.t(), 4, 1, order),
            "qzeros": pack_words(zeros.t(), 4, 1, order),
            "scales": scales.t().half().contiguous(),
        }
        return Quantized(tensors, weight)

    return quantize


def gptq(bits: int, group_size: int, *, version: int, desc_act: bool) -> Quantizer:
    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        size = columns if group_size == -1 else group_size
        group_of = torch.arange(columns) // size
        if desc_act:
            group_of = group_of[torch.randperm(columns, generator=draw)]
        steps, zeros, scales, weight = _grouped(rows, columns, bits, group_of, draw)
        tensors = {
            "qweight": pack_words(steps.t(), bits, 0),
            "qzeros": pack_words(zeros.t() - int(version == 1), bits, 1),
            "scales": scales.t().half().contiguous(),
            "g_idx": group_of.int(),
        }
        return Quantized(tensors, weight)

    return quantize


def packed_groups(bits: int, group_size: int | None, *, has_index: bool = False) -> Quantizer:
    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        group_of = torch.arange(columns) // (group_size or columns)
        if has_index:
            group_of = group_of[torch.randperm(columns, generator=draw)]
        steps, _, scales, _ = _grouped(rows, columns, bits, group_of, draw)
        tensors = {
            "weight_packed": pack_words(steps, bits, 1),
            "weight_scale": scales.to(torch.bfloat16),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if has_index:
            tensors["weight_g_idx"] = group_of.int()
        scales = tensors["weight_scale"].float()
        return Quantized(tensors, (steps - 2 ** (bits - 1)) * scales[:, group_of])

    return quantize


def _scaled(
    weight: Tensor, scale: Tensor, scale_name: str, wide: Tensor, **more: Tensor
) -> Quantized:
    return Quantized({"weight": weight, scale_name: scale, **more}, weight.float() * wide)


def fp8(
    scale_name: str, scales: str, *, block: int = 0, has_input_scale: bool = False
) -> Quantizer:
    """`scales`: one of `tensor`, `channel` and `block`."""

    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        weight = torch.randn(rows, columns, generator=draw).mul_(100).to(torch.float8_e4m3fn)
        shape = {
            "tensor": (1, 1),
            "channel": (rows, 1),
            "block": (-(-rows // (block or 1)), -(-columns // (block or 1))),
        }[scales]
        scale = (0.5 + torch.rand(shape, generator=draw)) * columns**-0.5 / 100
        wide = scale
        if scales == "block":
            wide = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        stored = scale.flatten()[0] if scales == "tensor" else scale
        more = {"input_scale": torch.tensor(0.5)} if has_input_scale else {}
        return _scaled(weight, stored, scale_name, wide, **more)

    return quantize


def int8(*, per_channel: bool) -> Quantizer:
    def quantize(rows: int, columns: int, draw: torch.Generator) -> Quantized:
        weight = torch.randint(-127, 128, (rows, columns), generator=draw).to(torch.int8)
        shape = (rows, 1) if per_channel else (1,)
        scale = (0.5 + torch.rand(shape, generator=draw)) * columns**-0.5 / 70
        return _scaled(weight, scale, "weight_scale", scale)

    return quantize


def mxfp4(rows: int, columns: int, draw: torch.Generator) -> Quantized:
    floats = torch.randint(0, 16, (rows, columns), generator=draw)
    shape = (rows, columns // 32)
    powers = torch.randint(-5, -2, shape, generator=draw) - int(columns**0.5).bit_length()
    sign, exponent, fraction = floats >> 3, (floats >> 1) & 3, floats & 1
    magnitude = torch.where(
        exponent == 0, fraction * 0.5, (1 + fraction * 0.5) * 2.0 ** (exponent - 1)
    )
    weight = (1 - 2 * sign) * magnitude * 2.0 ** powers.repeat_interleave(32, 1)
    tensors = {
        "blocks": (floats[:, ::2] + 16 * floats[:, 1::2]).to(torch.uint8).view(rows, -1, 16),
        "scales": (powers + 127).to(torch.uint8),
    }
    return Quantized(tensors, weight)


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
                "input_activations": {"dynamic": True} if layout != "pack-quantized" else None,
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
        fp8("weight_scale", "tensor", has_input_scale=True),
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
    "compressed-w4a16-actorder": (
        compressed(
            "pack-quantized", kind="int", bits=4, strategy="group", group_size=16, actorder="group"
        ),
        packed_groups(4, 16, has_index=True),
    ),
}
MXFP4: tuple[dict[str, Any], Quantizer] = (
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    mxfp4,
)


def write_quantized(
    name: str, folder: Path, architecture: str = "Qwen2ForCausalLM", **settings: Any
) -> tuple[Path, Path]:
    """Write a checkpoint in format `name`, and the same with the weights that it stands for.

    Args:
        name: key of `FORMATS`, or `mxfp4`, which only experts have.

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
        if module.rpartition(".")[2] not in _PROJECTIONS:
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
