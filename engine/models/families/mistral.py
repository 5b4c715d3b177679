"""Mistral 7B, Nemo, Small and Ministral: Llama with a sliding window in every layer, some or none.

Ministral 3 and Devstral 2 scale queries by position. Checkpoints with a vision part, as those and
Mistral Small 3.1, are served without it.
"""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_query_scaling, parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec
from engine.models.tensor_names import LLAMA_NAMES

# Architecture -> `model_type` of its text where it has a vision part.
_TYPES = {"MistralForCausalLM": "mistral", "Ministral3ForCausalLM": "ministral3"}


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    names, text, kind = LLAMA_NAMES, parsing.text_part(fields), _TYPES.get(architecture)
    if text is not None:
        names, fields = LLAMA_NAMES.beside_vision(), text
        kind = fields.text("model_type", default="mistral")
        if kind not in _TYPES.values():
            problem = f"{kind!r} is not supported; supported: {', '.join(_TYPES.values())}"
            raise fields.unsupported("model_type", problem)
    is_ministral_3 = kind == "ministral3"
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    query_scaling = parse_query_scaling(fields) if is_ministral_3 else None
    size = parsing.window(fields, absent=None if is_ministral_3 else 4096)
    heads = parsing.heads(fields, num_kv_heads=8, head_dim=128 if is_ministral_3 else None)
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    kinds = parsing.layer_types(fields) if architecture == "MinistralForCausalLM" else None
    every_layer = [parsing.SLIDING] * parsing.num_layers(fields)
    layers = [
        LayerSpec(
            parsing.attention(
                heads,
                rope,
                query_scaling=query_scaling,
                window=size if kind == parsing.SLIDING else None,
            ),
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
        tensor_names=names,
    )
