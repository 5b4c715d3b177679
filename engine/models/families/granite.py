"""Granite 3: Llama with multipliers of embeddings, scores, residual additions and logits."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    bias = fields.boolean("attention_bias", default=False)
    attention = parsing.attention(
        parsing.heads(fields),
        rope,
        scale=float(fields.number("attention_multiplier", default=1.0)),
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = Gated(
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields),
        bias=fields.boolean("mlp_bias", default=False),
    )
    multiplier = float(fields.number("residual_multiplier", default=1.0))
    layer = LayerSpec(attention, mlp, norm, residual_multiplier=multiplier)
    return parsing.model_spec(
        fields,
        architecture,
        [layer] * parsing.num_layers(fields),
        norm,
        context_length=parsing.scaled_context_length(fields, rope),
        embedding_multiplier=float(fields.number("embedding_multiplier", default=1.0)),
        logit_multiplier=1.0 / fields.number("logits_scaling", default=1.0),
    )
