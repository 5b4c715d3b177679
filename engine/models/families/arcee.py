"""Arcee's AFM: Llama with a plain MLP, of a squared ReLU."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import LayerSpec, ModelSpec, Plain


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    bias = fields.boolean("attention_bias", default=False)
    attention = parsing.attention(parsing.heads(fields), rope, qkv_bias=bias, output_bias=bias)
    mlp = Plain(
        fields.integer("intermediate_size"),
        parsing.plain_activation(fields, "hidden_act", absent="relu2"),
        bias=fields.boolean("mlp_bias", default=False),
    )
    layers = [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields)
    return parsing.model_spec(fields, architecture, layers, norm)
