"""Gemma 2: norms on both sides, soft caps, a window in every other layer."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec
from engine.models.tensor_names import TensorNames

NAMES = TensorNames(
    renamed=(
        ("attention_norm", "input_layernorm"),
        ("attention_output_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("mlp_output_norm", "post_feedforward_layernorm"),
    )
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    parsing.refuse(fields, use_bidirectional_attention=False)
    rope, norm = parse_rope(fields), parsing.rms_norm(fields, unit_offset=True)
    heads = parsing.heads(fields, num_kv_heads=4, head_dim=256)
    bias = fields.boolean("attention_bias", default=False)
    size = parsing.window(fields, absent=4096)
    kinds = parsing.layer_types(fields) or parsing.alternating(fields, every=2)
    mlp = Gated(
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields, "hidden_activation", absent="gelu_pytorch_tanh"),
    )
    layers = [
        LayerSpec(
            parsing.attention(
                heads,
                rope,
                scale=fields.number("query_pre_attn_scalar", default=256) ** -0.5,
                soft_cap=parsing.optional_number(fields, "attn_logit_softcapping", absent=50.0),
                window=size if kind == parsing.SLIDING else None,
                qkv_bias=bias,
                output_bias=bias,
            ),
            mlp,
            norm,
            "sandwich",
        )
        for kind in kinds
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
        tensor_names=NAMES,
        tie_word_embeddings=True,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        logit_soft_cap=parsing.optional_number(fields, "final_logit_softcapping", absent=30.0),
    )
