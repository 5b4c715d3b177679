"""OLMo 2: norms after attention and MLP, and over all queries and all keys."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec
from engine.models.tensor_names import TensorNames

_NAMES = TensorNames(
    renamed=(
        ("attention_output_norm", "post_attention_layernorm"),
        ("mlp_output_norm", "post_feedforward_layernorm"),
    )
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    bias = fields.boolean("attention_bias", default=False)
    attention = parsing.attention(
        parsing.heads(fields),
        rope,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=norm,
        qk_norm_is_wide=True,
    )
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, mlp, norm, "post")] * parsing.num_layers(fields),
        norm,
        context_length=parsing.scaled_context_length(fields, rope),
        tensor_names=_NAMES,
    )
