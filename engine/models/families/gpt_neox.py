"""GPT-NeoX and Pythia: attention and MLP in parallel, each behind a layer norm, partial rotary."""

from __future__ import annotations

from dataclasses import replace

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope, rotary_dim
from engine.models.spec import LayerSpec, ModelSpec, Plain
from engine.models.tensor_names import TensorNames

_NAMES = TensorNames(
    renamed=(
        ("model.embed_tokens", "model.embed_in"),
        ("attention_norm", "input_layernorm"),
        ("self_attn.qkv_proj", "attention.query_key_value"),
        ("self_attn.o_proj", "attention.dense"),
        ("mlp_norm", "post_attention_layernorm"),
        ("mlp.up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ("model.norm", "model.final_layer_norm"),
        ("lm_head", "embed_out"),
    ),
    prefixes=("gpt_neox.",),
    stacked=("qkv_proj",),
    # The causal mask, and what follows from the configuration.
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.*"),
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    fields = fields.calling(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    rope, norm = parse_rope(fields, is_partial=True), parsing.layer_norm(fields)
    heads = parsing.heads(fields)
    bias = fields.boolean("attention_bias", default=True)
    attention = parsing.attention(
        heads,
        rope,
        rotary_dim=rotary_dim(fields, heads.head_dim, factor=0.25),
        qkv_bias=bias,
        output_bias=bias,
    )
    activation = parsing.plain_activation(fields, "hidden_act", absent="gelu")
    is_parallel = fields.boolean("use_parallel_residual", default=True)
    layer = LayerSpec(
        attention,
        Plain(fields.integer("intermediate_size"), activation),
        norm,
        "parallel_apart" if is_parallel else "pre",
    )
    return parsing.model_spec(
        fields,
        architecture,
        [layer] * parsing.num_layers(fields),
        norm,
        tensor_names=replace(_NAMES, qkv_heads=heads.num_heads),
    )
