"""Llama 2 and 3.x."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    if "sliding_window" in fields:
        raise fields.unsupported("sliding_window", "is not supported for this architecture")
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    bias = fields.boolean("attention_bias", default=False)
    attention = parsing.attention(parsing.heads(fields), rope, qkv_bias=bias, output_bias=bias)
    mlp = Gated(
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields),
        bias=fields.boolean("mlp_bias", default=False),
    )
    layers = [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields)
    return parsing.model_spec(fields, architecture, layers, norm)
