"""The experts of a checkpoint as GGUF files have them: a tensor for a projection of a layer."""

from __future__ import annotations

import re
from typing import Any

import torch

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def with_experts_together(floats: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with one of each projection of a layer's experts."""
    together: dict[str, Any] = {}
    for name, tensor in floats.items():
        if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:  # gpt-oss
            together |= _projections(name, tensor)
            continue
        if name.endswith(".sinks"):
            together[f"{name}.weight"] = tensor
            continue
        found = _EXPERT.fullmatch(name)
        if found is None:
            together[name] = tensor
        else:
            experts = together.setdefault(f"{found[1]}.{found[3]}", {})
            experts[int(found[2])] = tensor
    return {
        name: torch.stack([each[i] for i in range(len(each))]) if isinstance(each, dict) else each
        for name, each in together.items()
    }


def with_experts_apart(
    floats: dict[str, torch.Tensor], *, is_gpt_oss: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors as a checkpoint in Hugging Face format has them."""
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in floats.items():
        if is_gpt_oss:
            apart |= _as_gpt_oss(name, floats)
            continue
        if tensor.dim() < 3:
            apart[name] = tensor
            continue
        module, _, projection = name.partition(".experts.")
        for i, expert in enumerate(tensor):
            apart[f"{module}.experts.{i}.{projection}"] = expert.contiguous()
    return apart


def _projections(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return gates, ups or downs of a tensor of gpt-oss, which has inputs first, or of a bias."""
    module, _, part = name.rpartition(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    if part.startswith("down"):
        return {f"{module}.down_proj.{kind}": rows.contiguous()}
    return {
        f"{module}.{projection}.{kind}": rows[:, first::2].contiguous()
        for first, projection in enumerate(("gate_proj", "up_proj"))
    }


def _as_gpt_oss(name: str, floats: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the tensor `name` of `floats`, or it and others, are in its checkpoints."""
    module, _, kind = name.rpartition(".")
    if ".experts." not in name:
        return {name.removesuffix(".weight") if "sinks" in name else name: floats[name]}
    if ".up_proj" in name:
        return {}
    rows = floats[name]
    if ".gate_proj" in name:
        ups = floats[name.replace(".gate_proj", ".up_proj")]
        rows = torch.stack((rows, ups), 2).flatten(1, 2)
        module = module.replace(".gate_proj", ".gate_up_proj")
    if kind == "bias":
        return {f"{module}_bias": rows}
    return {module: rows.transpose(1, 2).contiguous()}
