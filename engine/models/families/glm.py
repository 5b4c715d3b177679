"""GLM 4: half of each head rotated in adjacent pairs; from GLM-4-0414 norms on both sides."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope, rotary_dim
from engine.models.spec import Gated, LayerSpec, ModelSpec
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

_STACKED = ("gate_up_proj",)
_NAMES = TensorNames(renamed=LLAMA_NAMES.renamed, stacked=_STACKED)
_SANDWICH_NAMES = TensorNames(
    renamed=(
        *LLAMA_NAMES.renamed,
        ("attention_output_norm", "post_self_attn_layernorm"),
        ("mlp_output_norm", "post_mlp_layernorm"),
    ),
    stacked=_STACKED,
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    is_sandwich = architecture == "Glm4ForCausalLM"
    rope, norm = parse_rope(fields, is_partial=True), parsing.rms_norm(fields)
    heads = parsing.heads(fields, num_kv_heads=2, head_dim=128)
    attention = parsing.attention(
        heads,
        rope,
        rotary_dim=rotary_dim(fields, heads.head_dim, factor=0.5),
        rotary_interleaved=True,
        qkv_bias=fields.boolean("attention_bias", default=True),
    )
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    layer = LayerSpec(attention, mlp, norm, "sandwich" if is_sandwich else "pre")
    return parsing.model_spec(
        fields,
        architecture,
        [layer] * parsing.num_layers(fields),
        norm,
        tensor_names=_SANDWICH_NAMES if is_sandwich else _NAMES,
    )
