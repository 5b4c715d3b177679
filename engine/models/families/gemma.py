"""Gemma 1: norms with a unit offset, gates with GELU, scaled embeddings."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    parsing.refuse(fields, use_bidirectional_attention=False)
    rope, norm = parse_rope(fields), parsing.rms_norm(fields, unit_offset=True)
    bias = fields.boolean("attention_bias", default=False)
    attention = parsing.attention(
        parsing.heads(fields, num_kv_heads=16, head_dim=256),
        rope,
        qkv_bias=bias,
        output_bias=bias,
    )
    activation = parsing.gated_activation(fields, absent="gelu_pytorch_tanh")
    # Old checkpoints write `gelu`, and mean its approximation.
    activation = "gelu_tanh" if activation == "gelu" else activation
    mlp = Gated(fields.integer("intermediate_size"), activation)
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields),
        norm,
        tie_word_embeddings=True,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
    )
