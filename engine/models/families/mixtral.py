"""Mixtral: Mistral with a mixture of experts."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import LayerSpec, ModelSpec, MoE
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

_NAMES = TensorNames(
    renamed=(
        *LLAMA_NAMES.renamed,
        ("mlp.router", "block_sparse_moe.gate"),
        ("mlp", "block_sparse_moe"),
        ("gate_proj", "w1"),
        ("down_proj", "w2"),
        ("up_proj", "w3"),
    )
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields, theta=1e6), parsing.rms_norm(fields)
    attention = parsing.attention(
        parsing.heads(fields, num_kv_heads=8),
        rope,
        window=parsing.window(fields, absent=None),
    )
    moe = MoE(
        *parsing.experts(fields, "num_local_experts", absent=8),
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields),
    )
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, moe, norm)] * parsing.num_layers(fields),
        norm,
        tensor_names=_NAMES,
    )
