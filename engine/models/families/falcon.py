"""Falcon 7B: one KV head; attention and MLP in parallel behind one layer norm."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import LayerSpec, ModelSpec, Plain
from engine.models.tensor_names import TensorNames

_NAMES = TensorNames(
    renamed=(
        ("model.embed_tokens", "model.word_embeddings"),
        ("model.layers", "model.h"),
        ("attention_norm", "input_layernorm"),
        ("self_attn.qkv_proj", "self_attention.query_key_value"),
        ("self_attn.o_proj", "self_attention.dense"),
        ("mlp_norm", "post_attention_layernorm"),
        ("mlp.up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ("model.norm", "model.ln_f"),
    ),
    prefixes=("transformer.",),
    stacked=("qkv_proj",),
)
_DEFAULTS = {"max_position_embeddings": 2048}


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    fields = fields.over(_DEFAULTS)
    # The others have ALiBi, or queries, keys and values of a group side by side.
    parsing.refuse(fields, multi_query=True, new_decoder_architecture=False, alibi=False)
    rope, norm = parse_rope(fields), parsing.layer_norm(fields, "layer_norm_epsilon")
    bias = fields.boolean("bias", default=False)
    heads = parsing.heads(fields)._replace(num_kv_heads=1)
    attention = parsing.attention(heads, rope, qkv_bias=bias, output_bias=bias)
    mlp = Plain(
        fields.integer("ffn_hidden_size", default=4 * fields.integer("hidden_size")),
        parsing.plain_activation(fields, "activation", absent="gelu"),
        bias,
    )
    is_parallel = fields.boolean("parallel_attn", default=True)
    layer = LayerSpec(attention, mlp, norm, "parallel" if is_parallel else "pre")
    return parsing.model_spec(
        fields,
        architecture,
        [layer] * parsing.num_layers(fields),
        norm,
        tensor_names=_NAMES,
        tie_word_embeddings=True,
    )
