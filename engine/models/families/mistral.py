"""Mistral 7B and Nemo: Llama with a sliding window in every layer, or in none."""

from __future__ import annotations

from engine.models import parsing
from engine.models.fields import Fields
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    window = parsing.window(fields, absent=4096)
    parsing.require_equal_layers(fields, window)
    attention = parsing.attention(parsing.heads(fields, num_kv_heads=8), rope, window=window)
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    layers = [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields)
    context_length = parsing.scaled_context_length(fields, rope)
    return parsing.model_spec(fields, architecture, layers, norm, context_length=context_length)
