"""SmolLM 3: Llama with layers that have no rotary embedding."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    parsing.refuse(fields, use_sliding_window=False)
    fields = fields.without("use_sliding_window")  # `layer_types` counts all the same
    rope, norm = parse_rope(fields, theta=2e6), parsing.rms_norm(fields)
    heads = parsing.heads(fields, num_kv_heads=4)
    bias = fields.boolean("attention_bias", default=False)
    mlp = Gated(
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields),
        bias=fields.boolean("mlp_bias", default=False),
    )
    layers = [
        LayerSpec(
            parsing.attention(heads, rope if rotates else None, qkv_bias=bias, output_bias=bias),
            mlp,
            norm,
        )
        for rotates in _rotating_layers(fields)
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
        tie_word_embeddings=True,
    )


def _rotating_layers(fields: Fields) -> list[bool]:
    """Return which layers have rope: those with a 1 in `no_rope_layers`, despite its name."""
    count = parsing.num_layers(fields)
    flags = fields.integers("no_rope_layers")
    if not flags:
        every = fields.integer("no_rope_layer_interval", default=4)
        return [bool((i + 1) % every) for i in range(count)]
    if len(flags) != count or not set(flags) <= {0, 1}:
        raise fields.error("no_rope_layers", f"must give 0 or 1 for each of {count} layers")
    return [bool(flag) for flag in flags]
