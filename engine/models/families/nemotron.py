"""Nemotron 4 and Minitron: layer norms with a unit offset, a squared ReLU, partial rotary."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope, rotary_dim
from engine.models.spec import LayerSpec, ModelSpec, Plain


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope = parse_rope(fields, is_partial=True)
    norm = parsing.layer_norm(fields, "norm_eps", unit_offset=True)
    heads = parsing.heads(fields)
    bias = fields.boolean("attention_bias", default=False)
    attention = parsing.attention(
        heads,
        rope,
        rotary_dim=rotary_dim(fields, heads.head_dim, factor=0.5),
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = Plain(
        fields.integer("intermediate_size"),
        parsing.plain_activation(fields, "hidden_act", absent="relu2"),
        bias=fields.boolean("mlp_bias", default=False),
    )
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields),
        norm,
    )
