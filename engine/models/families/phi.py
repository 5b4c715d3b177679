"""Phi-1, 1.5 and 2: attention and MLP in parallel behind one layer norm, partial rotary."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope, rotary_dim
from engine.models.spec import LayerSpec, ModelSpec, Plain
from engine.models.tensor_names import TensorNames

_NAMES = TensorNames(
    renamed=(
        ("attention_norm", "input_layernorm"),
        ("self_attn.o_proj", "self_attn.dense"),
        ("mlp.up_proj", "mlp.fc1"),
        ("mlp.down_proj", "mlp.fc2"),
        ("model.norm", "model.final_layernorm"),
        ("lm_head_bias", "lm_head.bias"),
    )
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    parsing.refuse(fields, qk_layernorm=False)
    rope, norm = parse_rope(fields, is_partial=True), parsing.layer_norm(fields)
    heads = parsing.heads(fields)
    attention = parsing.attention(
        heads,
        rope,
        rotary_dim=rotary_dim(fields, heads.head_dim, factor=0.5),
        qkv_bias=True,
        output_bias=True,
    )
    activation = parsing.plain_activation(fields, "hidden_act", absent="gelu_new")
    layer = LayerSpec(
        attention, Plain(fields.integer("intermediate_size"), activation), norm, "parallel"
    )
    return parsing.model_spec(
        fields,
        architecture,
        [layer] * parsing.num_layers(fields),
        norm,
        tensor_names=_NAMES,
        head_bias=True,
    )
