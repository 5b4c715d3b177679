"""Mistral 7B, Nemo, Small and Ministral: Llama with a sliding window in every layer, some or none.

Mistral Small 3.1 and later have a vision part, and are served without it.
"""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec
from engine.models.tensor_names import LLAMA_NAMES


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    names, text = LLAMA_NAMES, parsing.text_part(fields)
    if text is not None:
        names, fields = LLAMA_NAMES.beside_vision(), text
        parsing.refuse(fields, model_type="mistral")
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    size = parsing.window(fields, absent=4096)
    heads = parsing.heads(fields, num_kv_heads=8)
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    kinds = parsing.layer_types(fields) if architecture == "MinistralForCausalLM" else None
    every_layer = [parsing.SLIDING] * parsing.num_layers(fields)
    layers = [
        LayerSpec(
            parsing.attention(heads, rope, window=size if kind == parsing.SLIDING else None),
            mlp,
            norm,
        )
        for kind in kinds or every_layer
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
        context_length=parsing.scaled_context_length(fields, rope),
        tensor_names=names,
    )
