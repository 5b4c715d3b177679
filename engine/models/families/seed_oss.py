"""Seed-OSS: Llama with heads of their own size, and biases of queries, keys and values."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    attention = parsing.attention(
        parsing.heads(fields, num_kv_heads=8, head_dim=128),
        rope,
        qkv_bias=fields.boolean("attention_bias", default=True),
        output_bias=fields.boolean("attention_out_bias", default=False),
    )
    mlp = Gated(
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields),
        bias=fields.boolean("mlp_bias", default=False),
    )
    layers = [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields)
    return parsing.model_spec(fields, architecture, layers, norm)
