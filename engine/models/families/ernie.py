"""ERNIE 4.5: Llama, rotated in adjacent pairs."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields, theta=5e5), parsing.rms_norm(fields)
    bias = fields.boolean("use_bias", default=False)
    attention = parsing.attention(
        parsing.heads(fields, num_kv_heads=2, head_dim=128),
        rope,
        rotary_interleaved=True,
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields), bias=bias)
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields),
        norm,
        context_length=parsing.scaled_context_length(fields, rope),
        tie_word_embeddings=True,
    )
