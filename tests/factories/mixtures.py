"""Mixtures of experts of transformers, and ours with the same weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from engine.layers.experts import Experts
from engine.layers.linear.linear import FloatLinear
from engine.layers.moe import MoE
from engine.layers.scheme import Unquantized
from kernels.experts.activation import ExpertActivation

HIDDEN, SIZE, SHARED, NUM_EXPERTS, TOP_K = 72, 48, 40, 6, 3
CONFIG = {
    "hidden_size": HIDDEN,
    "num_experts_per_tok": TOP_K,
    "_experts_implementation": "eager",
}


def _mixtral() -> nn.Module:
    config = MixtralConfig(intermediate_size=SIZE, num_local_experts=NUM_EXPERTS, **CONFIG)
    return MixtralSparseMoeBlock(config)


def _qwen2(*, normalizes: bool = False) -> nn.Module:
    config = Qwen2MoeConfig(
        moe_intermediate_size=SIZE,
        shared_expert_intermediate_size=SHARED,
        num_experts=NUM_EXPERTS,
        norm_topk_prob=normalizes,
        **CONFIG,
    )
    return Qwen2MoeSparseMoeBlock(config)


def _qwen3(*, normalizes: bool = True) -> nn.Module:
    config = Qwen3MoeConfig(
        moe_intermediate_size=SIZE, num_experts=NUM_EXPERTS, norm_topk_prob=normalizes, **CONFIG
    )
    return Qwen3MoeSparseMoeBlock(config)


def _gpt_oss() -> nn.Module:
    config = GptOssConfig(
        intermediate_size=SIZE, num_local_experts=NUM_EXPERTS, swiglu_limit=0.7, **CONFIG
    )
    return GptOssMLP(config)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2,
    "qwen2_moe normalised": lambda: _qwen2(normalizes=True),
    "qwen3_moe": _qwen3,
    "qwen3_moe not normalised": lambda: _qwen3(normalizes=False),
    "gpt_oss": _gpt_oss,
}


def reference_block(kind: str) -> nn.Module:
    """Return transformers' layer of that kind, with random weights in float32."""
    generator = torch.Generator().manual_seed(0)
    theirs = KINDS[kind]().requires_grad_(False)
    for parameter in theirs.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return theirs


def our_layer(kind: str, theirs: nn.Module, device: torch.device) -> MoE:
    """Return our layer with the weights of theirs, copied to where it says that they go."""
    is_gpt_oss = kind == "gpt_oss"
    gpt_oss = ExpertActivation(alpha=1.702, limit=0.7, offset=1.0)
    ours = MoE(
        HIDDEN,
        SIZE,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        normalizes=kind not in ("qwen2_moe", "qwen3_moe not normalised"),
        activation=gpt_oss if is_gpt_oss else ExpertActivation(),
        shared_size=SHARED if kind.startswith("qwen2") else 0,
        bias=is_gpt_oss,
        scheme=Unquantized(torch.float32, device),
    )
    destinations = _destinations(ours, is_stacked=is_gpt_oss)
    stored = _stored(theirs)
    assert destinations.keys() == stored.keys()
    for name, destination in destinations.items():
        assert destination.shape == stored[name].shape, name
        destination.copy_(stored[name])
    return ours


def _destinations(ours: MoE, *, is_stacked: bool) -> dict[str, Tensor]:
    experts = ours.experts
    assert isinstance(experts, Experts)
    destinations = experts.stacked_destinations() if is_stacked else experts.destinations()
    for path, module in ours.named_modules():
        if isinstance(module, FloatLinear):
            destinations |= module.destinations()
        elif hasattr(module, "destinations") and not isinstance(module, Experts):
            parent = path.rpartition(".")[0]
            destinations |= {f"{parent}.{key}": to for key, to in module.destinations().items()}
    return destinations


def _stored(theirs: nn.Module) -> dict[str, Tensor]:
    """Return their weights as a checkpoint holds them, with our name of the router."""
    stored: dict[str, Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        ours = name.replace("gate.", "router.") if name.startswith("gate.") else name
        if isinstance(theirs, GptOssMLP) or not name.startswith("experts."):
            stored[ours] = tensor
            continue
        for i, each in enumerate(tensor):
            if name == "experts.gate_up_proj":
                gate, up = each.chunk(2)
                stored[f"experts.{i}.gate_proj.weight"] = gate
                stored[f"experts.{i}.up_proj.weight"] = up
            else:
                stored[f"experts.{i}.down_proj.weight"] = each
    return stored


def reference_result(theirs: nn.Module, x: Tensor) -> Tensor:
    """Return what transformers' layer makes of `x` [T, HIDDEN]."""
    out = theirs(x[None])
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first[0]
