"""StableLM: Llama with layer norms and partial rotary; some are parallel."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope, rotary_dim
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    parsing.refuse(fields, qk_layernorm=False)
    rope, norm = parse_rope(fields, is_partial=True), parsing.layer_norm(fields)
    heads = parsing.heads(fields, num_kv_heads=32)
    attention = parsing.attention(
        heads,
        rope,
        rotary_dim=rotary_dim(fields, heads.head_dim, factor=0.25),
        qkv_bias=fields.boolean("use_qkv_bias", default=False),
    )
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    is_parallel = fields.boolean("use_parallel_residual", default=False)
    layer = LayerSpec(attention, mlp, norm, "parallel" if is_parallel else "pre")
    return parsing.model_spec(
        fields,
        architecture,
        [layer] * parsing.num_layers(fields),
        norm,
    )
