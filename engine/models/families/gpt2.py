"""GPT-2: learned positions, layer norms, a plain MLP, and linears that are stored transposed."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.spec import LayerSpec, LearnedPositions, ModelSpec, Plain
from engine.models.tensor_names import TensorNames

_NAMES = TensorNames(
    renamed=(
        ("model.embed_tokens", "model.wte"),
        ("model.embed_positions", "model.wpe"),
        ("model.layers", "model.h"),
        ("attention_norm", "ln_1"),
        ("self_attn.qkv_proj", "attn.c_attn"),
        ("self_attn.o_proj", "attn.c_proj"),
        ("mlp_norm", "ln_2"),
        ("mlp.up_proj", "mlp.c_fc"),
        ("mlp.down_proj", "mlp.c_proj"),
        ("model.norm", "model.ln_f"),
    ),
    prefixes=("transformer.", ""),
    stacked=("qkv_proj",),
    transposed=True,
    ignored=("*.attn.bias", "*.attn.masked_bias"),  # the causal mask
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    fields = fields.calling(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
    )
    parsing.refuse(
        fields,
        add_cross_attention=False,
        scale_attn_by_inverse_layer_idx=False,
        scale_attn_weights=True,
    )
    norm = parsing.layer_norm(fields, "layer_norm_epsilon")
    hidden_size, positions = fields.integer("hidden_size"), parsing.max_positions(fields)
    attention = parsing.attention(parsing.heads(fields), None, qkv_bias=True, output_bias=True)
    mlp = Plain(
        fields.integer("intermediate_size", default=4 * hidden_size),
        parsing.plain_activation(fields, "activation_function", absent="gelu_new"),
    )
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields),
        norm,
        context_length=positions,
        tensor_names=_NAMES,
        tie_word_embeddings=True,
        learned_positions=LearnedPositions(positions),
    )
