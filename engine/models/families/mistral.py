"""Mistral 7B, Nemo and Ministral: Llama with a sliding window in every layer, some or none."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    size = parsing.window(fields, absent=4096)
    heads = parsing.heads(fields, num_kv_heads=8)
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    kinds = None if architecture == "MistralForCausalLM" else parsing.layer_types(fields)
    every_layer = [parsing.SLIDING] * parsing.num_layers(fields)
    layers = [
        LayerSpec(
            parsing.attention(heads, rope, window=size if kind == parsing.SLIDING else None),
            mlp,
            norm,
        )
        for kind in kinds or every_layer
    ]
    context_length = parsing.scaled_context_length(fields, rope)
    return parsing.model_spec(fields, architecture, layers, norm, context_length=context_length)
