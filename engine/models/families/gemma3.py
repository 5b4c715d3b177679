"""Gemma 3, its text: norms of queries and keys, five layers with a window for each without.

Checkpoints with a vision part are served without it.
"""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.families import gemma2
from engine.models.rope import parse_rope_by_layer_type
from engine.models.spec import Gated, LayerSpec, ModelSpec

# What checkpoints with a vision part leave out.
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
}


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    text = parsing.text_part(fields)
    names = gemma2.NAMES if text is None else gemma2.NAMES.beside_vision()
    fields = (text or fields).over(_DEFAULTS)
    parsing.refuse(
        fields,
        use_bidirectional_attention=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )
    norm = parsing.rms_norm(fields, unit_offset=True)
    heads = parsing.heads(fields, num_kv_heads=4, head_dim=256)
    bias = fields.boolean("attention_bias", default=False)
    size = parsing.window(fields, absent=4096)
    every = fields.integer("sliding_window_pattern", default=6)
    ropes = parse_rope_by_layer_type(
        fields, theta=1e6, sliding_theta=1e4, sliding_field="rope_local_base_freq"
    )
    mlp = Gated(
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields, "hidden_activation", absent="gelu_pytorch_tanh"),
    )
    layers = [
        LayerSpec(
            parsing.attention(
                heads,
                ropes[kind],
                scale=fields.number("query_pre_attn_scalar", default=256) ** -0.5,
                window=size if kind == parsing.SLIDING else None,
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=norm,
            ),
            mlp,
            norm,
            "sandwich",
        )
        for kind in parsing.layer_types(fields) or parsing.alternating(fields, every=every)
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
        context_length=fields.integer("max_position_embeddings"),
        tensor_names=names,
        tie_word_embeddings=True,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
    )
