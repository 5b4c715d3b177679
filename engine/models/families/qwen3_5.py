"""Qwen 3.5 and later, their text: linear attention in most layers, gated attention in the others.

Of a text all three positions of a token are the same: rope by sections of them is the usual one.
The layers for speculative decoding, and the vision part, are left out.
"""

from __future__ import annotations

from typing import Literal

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope, rotary_dim
from engine.models.spec import AttentionSpec, DeltaSpec, Gated, LayerSpec, ModelSpec, MoE, NormSpec
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

LINEAR = "linear_attention"
# Far more than those of all models, and states of them can be counted in bytes.
_MOST_HEADS = 4096
_MOST_DIM = 1024

_GATES: dict[str, Literal["silu", "sigmoid"]] = {
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
}
_MOE = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
NAMES = TensorNames(
    renamed=(
        *LLAMA_NAMES.renamed,
        ("mlp.router", "mlp.gate"),
        ("state_mixer.conv_weight", "linear_attn.conv1d.weight"),
        ("state_mixer.log_decay", "linear_attn.A_log"),
        ("state_mixer.norm_weight", "linear_attn.norm.weight"),
        ("state_mixer", "linear_attn"),
    ),
    prefixes=("model.language_model.", "model."),
    experts=None,  # in one tensor, as they are trained, or each alone, as they are quantised
    outputs_first=True,
    gates_first=True,
    ignored=(*LLAMA_NAMES.ignored, "mtp.*", "visual.*", "model.visual.*"),
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    fields = parsing.text_part(fields) or fields
    is_moe = architecture in _MOE
    norm = parsing.rms_norm(fields, unit_offset=True)
    attention = gated_attention(fields, norm, num_kv_heads=2 if is_moe else 4)
    linear = delta(fields)
    mlp: Gated | MoE
    if is_moe:
        parsing.refuse(fields, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1)
        mlp = mixture(fields, num_experts=256, num_chosen=8)
    else:
        mlp = Gated(fields.integer("intermediate_size"))
    layers = [
        LayerSpec(linear if kind == LINEAR else attention, mlp, norm) for kind in kinds(fields)
    ]
    return parsing.model_spec(fields, architecture, layers, norm, tensor_names=NAMES)


def gated_attention(fields: Fields, norm: NormSpec, *, num_kv_heads: int) -> AttentionSpec:
    """Make the spec of the layers with attention; `num_kv_heads` where the field is absent."""
    parsing.refuse(fields, attn_output_gate=True)
    heads = parsing.heads(fields, num_kv_heads=num_kv_heads, head_dim=256)
    bias = fields.boolean("attention_bias", default=False)
    return parsing.attention(
        heads,
        parse_rope(fields, is_partial=True),
        rotary_dim=rotary_dim(fields, heads.head_dim, factor=0.25),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=norm,
        has_gate=True,
    )


def kinds(fields: Fields) -> list[str]:
    """Return of which kind each layer is."""
    types = parsing.layer_types(fields, (LINEAR, parsing.FULL))
    if types is not None:
        return types
    every = fields.integer("full_attention_interval", default=4)
    return [LINEAR if (i + 1) % every else parsing.FULL for i in range(parsing.num_layers(fields))]


def delta(fields: Fields) -> DeltaSpec:
    """Make the spec of the layers with linear attention."""
    if parsing.gated_activation(fields) != "silu":  # of the convolution too
        raise fields.unsupported("hidden_act", "is supported only if it is silu")
    gate = fields.text("output_gate_type", default="silu")
    if gate not in _GATES:
        problem = f"{gate!r} is not supported; supported: {', '.join(_GATES)}"
        raise fields.unsupported("output_gate_type", problem)
    num_key_heads = fields.integer("linear_num_key_heads", default=16, maximum=_MOST_HEADS)
    num_heads = fields.integer("linear_num_value_heads", default=32, maximum=_MOST_HEADS)
    if num_heads % num_key_heads:
        raise fields.error(
            "linear_num_value_heads",
            f"must be a multiple of linear_num_key_heads ({num_heads} % {num_key_heads} != 0)",
        )
    return DeltaSpec(
        num_key_heads,
        num_heads,
        key_dim=fields.integer("linear_key_head_dim", default=128, maximum=_MOST_DIM),
        value_dim=fields.integer("linear_value_head_dim", default=128, maximum=_MOST_DIM),
        kernel=fields.integer("linear_conv_kernel_dim", default=4, maximum=parsing.MOST_TAPS),
        norm_eps=fields.number("rms_norm_eps"),
        gate=_GATES[gate],
    )


def mixture(fields: Fields, *, num_experts: int, num_chosen: int) -> MoE:
    """Make the spec of the layers with experts; these are their numbers where fields are absent."""
    fields = fields.over({"num_experts_per_tok": num_chosen})
    return MoE(
        *parsing.experts(fields, "num_experts", absent=num_experts),
        fields.integer("moe_intermediate_size", default=512),
        normalizes=fields.boolean("norm_topk_prob", default=True),
        shared_size=fields.integer("shared_expert_intermediate_size", default=512),
    )
