"""OLMo 1: Llama with layer norms that have no weights."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec, NormSpec

_NORM = NormSpec("layer", 1e-5, has_weight=False, has_bias=False)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    parsing.refuse(fields, clip_qkv=None)
    rope, bias = parse_rope(fields), fields.boolean("attention_bias", default=False)
    attention = parsing.attention(parsing.heads(fields), rope, qkv_bias=bias, output_bias=bias)
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    layers = [LayerSpec(attention, mlp, _NORM)] * parsing.num_layers(fields)
    return parsing.model_spec(fields, architecture, layers, _NORM)
