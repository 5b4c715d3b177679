"""CWM: Llama with windows in three of four layers."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec

# Where a checkpoint leaves it out.
_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    fields = fields.over({"rope_parameters": _ROPE})
    rope, norm = parse_rope(fields, theta=1e6), parsing.rms_norm(fields)
    heads = parsing.heads(fields, num_kv_heads=8, head_dim=128)
    size = parsing.window(fields, absent=8192)
    mlp = Gated(
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields),
        bias=fields.boolean("mlp_bias", default=False),
    )
    layers = [
        LayerSpec(
            parsing.attention(heads, rope, window=size if kind == parsing.SLIDING else None),
            mlp,
            norm,
        )
        for kind in parsing.layer_types(fields) or _layer_types(parsing.num_layers(fields))
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
    )


def _layer_types(count: int) -> list[str]:
    """Return layer types where the first layer, and each fourth after it, has no window."""
    return [parsing.SLIDING if i % 4 else parsing.FULL for i in range(count)]
