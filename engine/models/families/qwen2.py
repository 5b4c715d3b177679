"""Qwen 2 and 2.5: biases of q, k and v, and windows that a field switches on."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    fields = fields.over(parsing.NO_WINDOWS)
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    heads = parsing.heads(fields, num_kv_heads=32)
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    layers = [
        LayerSpec(parsing.attention(heads, rope, window=window, qkv_bias=True), mlp, norm)
        for window in parsing.switched_windows(fields)
    ]
    return parsing.model_spec(fields, architecture, layers, norm)
