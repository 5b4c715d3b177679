"""LFM2 and 2.5: short convolutions between two gates in most layers, attention in the others.

The larger ones are mixtures of experts behind a few dense layers. Of LFM2-VL the text is served.
"""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import ConvSpec, Gated, LayerSpec, ModelSpec, MoE, NormSpec
from engine.models.tensor_names import TensorNames

_CONV = "conv"
_MOST_FEATURES = 2**31 - 1

_NAMES = TensorNames(
    renamed=(
        ("attention_norm", "operator_norm"),
        ("mlp_norm", "ffn_norm"),
        ("model.norm", "model.embedding_norm"),
        ("q_norm", "q_layernorm"),
        ("k_norm", "k_layernorm"),
        ("o_proj", "out_proj"),
        ("state_mixer.conv_weight", "conv.conv.weight"),
        ("state_mixer.conv_bias", "conv.conv.bias"),
        ("state_mixer", "conv"),
        ("mlp.router", "feed_forward.gate"),
        ("mlp.choice_bias", "feed_forward.expert_bias"),
        ("mlp", "feed_forward"),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
    )
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    text = parsing.text_part(fields)
    names = _NAMES if text is None else _NAMES.beside_vision()
    fields = text or fields
    # Older checkpoints have other names for two of the fields; those count where both are there.
    older = {"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}
    fields = fields.calling(**{name: old for name, old in older.items() if old in fields})
    size = fields.integer("hidden_size")
    parsing.refuse(
        fields, conv_dim=size, conv_dim_out=size, block_use_swiglu=True, use_pos_enc=True
    )
    norm = NormSpec("rms", fields.number("norm_eps", default=1e-5))
    attention = parsing.attention(
        parsing.heads(fields, num_kv_heads=8), parse_rope(fields, theta=1e6), qk_norm=norm
    )
    conv = ConvSpec(
        size,
        fields.integer("conv_L_cache", default=3, maximum=parsing.MOST_TAPS),
        fields.boolean("conv_bias", default=False),
    )
    layers = [
        LayerSpec(conv if kind == _CONV else attention, mlp, norm)
        for kind, mlp in zip(_kinds(fields), _mlps(fields, architecture), strict=True)
    ]
    return parsing.model_spec(
        fields, architecture, layers, norm, tensor_names=names, tie_word_embeddings=True
    )


def _kinds(fields: Fields) -> list[str]:
    """Return of which kind each layer is."""
    kinds = parsing.layer_types(fields, (_CONV, parsing.FULL))
    if kinds is not None:
        return kinds
    count = parsing.num_layers(fields)
    if "full_attn_idxs" not in fields:
        return [parsing.FULL] * count
    attentions = fields.integers("full_attn_idxs")
    if not all(0 <= i < count for i in attentions):
        raise fields.error("full_attn_idxs", f"must be layers below num_hidden_layers {count}")
    return [parsing.FULL if i in attentions else _CONV for i in range(count)]


def _mlps(fields: Fields, architecture: str) -> list[Gated | MoE]:
    """Return the MLP of each layer."""
    count = parsing.num_layers(fields)
    if architecture != "Lfm2MoeForCausalLM":
        return [Gated(_adjusted_size(fields))] * count
    fields = fields.over({"num_experts_per_tok": 4})
    moe = MoE(
        *parsing.experts(fields, "num_experts", absent=32),
        fields.integer("moe_intermediate_size", default=1792),
        scores="sigmoid",
        chooses_by_bias=fields.boolean("use_expert_bias", default=True),
        normalizes=fields.boolean("norm_topk_prob", default=True),
        weight_scale=float(fields.number("routed_scaling_factor", default=1.0)),
    )
    dense = Gated(fields.integer("intermediate_size", default=7168))
    num_dense = fields.integer("num_dense_layers", default=2, minimum=0)
    return [dense if i < num_dense else moe for i in range(count)]


def _adjusted_size(fields: Fields) -> int:
    """Return the features of a dense MLP: two thirds of the field, in multiples of another."""
    size = fields.integer("intermediate_size", default=12288)
    if not fields.boolean("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    multiplier = parsing.optional_number(fields, "block_ffn_dim_multiplier", absent=1.0)
    if multiplier is not None:
        multiple = fields.integer("block_multiple_of", default=256)
        size = multiple * -(-int(min(multiplier * size, _MOST_FEATURES)) // multiple)
    if not 1 <= size <= _MOST_FEATURES:
        problem = f"must give from 1 to {_MOST_FEATURES} features, once it is adjusted (got {size})"
        raise fields.error("intermediate_size", problem)
    return size
