"""OLMo 2 and 3: norms after attention and MLP, and over all queries and all keys.

3 has windows, and does not scale the rope of those layers.
"""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope, parse_rope_by_layer_type
from engine.models.spec import Gated, LayerSpec, ModelSpec
from engine.models.tensor_names import TensorNames

NAMES = TensorNames(
    renamed=(
        ("attention_output_norm", "post_attention_layernorm"),
        ("mlp_output_norm", "post_feedforward_layernorm"),
    )
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    norm, bias = parsing.rms_norm(fields), fields.boolean("attention_bias", default=False)
    if architecture == "Olmo2ForCausalLM":
        ropes, size = {parsing.FULL: parse_rope(fields)}, None
        kinds = [parsing.FULL] * parsing.num_layers(fields)
    else:
        ropes = parse_rope_by_layer_type(fields, theta=5e5, sliding_theta=5e5)
        size = parsing.window(fields, absent=4096)
        kinds = parsing.layer_types(fields) or parsing.alternating(fields, every=4)
    heads = parsing.heads(fields)
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    layers = [
        LayerSpec(
            parsing.attention(
                heads,
                ropes[kind],
                window=size if kind == parsing.SLIDING else None,
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=norm,
                qk_norm_is_wide=True,
            ),
            mlp,
            norm,
            "post",
        )
        for kind in kinds
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
        tensor_names=NAMES,
    )
