"""OPT: learned positions, layer norms and a plain MLP. OPT-350m, which differs, is refused."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.spec import LayerSpec, LearnedPositions, ModelSpec, Plain
from engine.models.tensor_names import TensorNames

_NAMES = TensorNames(
    renamed=(
        ("attention_norm", "self_attn_layer_norm"),
        ("self_attn.o_proj", "self_attn.out_proj"),
        ("mlp_norm", "final_layer_norm"),
        ("mlp.up_proj", "fc1"),
        ("mlp.down_proj", "fc2"),
        ("model.norm", "model.final_layer_norm"),
    ),
    prefixes=("model.decoder.", "decoder."),
)
_OFFSET = 2  # of the rows of positions


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    hidden_size, positions = fields.integer("hidden_size"), parsing.max_positions(fields)
    parsing.refuse(
        fields,
        do_layer_norm_before=True,
        word_embed_proj_dim=hidden_size,
        layer_norm_elementwise_affine=True,
        _remove_final_layer_norm=False,
    )
    norm = parsing.layer_norm(fields)
    bias = fields.boolean("enable_bias", default=True)
    attention = parsing.attention(parsing.heads(fields), None, qkv_bias=bias, output_bias=bias)
    activation = parsing.plain_activation(fields, "activation_function", absent="relu")
    mlp = Plain(fields.integer("ffn_dim"), activation, bias)
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields),
        norm,
        context_length=positions,
        tensor_names=_NAMES,
        tie_word_embeddings=True,
        learned_positions=LearnedPositions(positions + _OFFSET, _OFFSET),
    )
