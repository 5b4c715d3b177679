"""ERNIE 4.5: Llama, rotated in adjacent pairs; the larger ones are mixtures of experts.

The layers for speculative decoding are left out.
"""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec, MoE
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

_MOE_NAMES = TensorNames(
    renamed=(
        *LLAMA_NAMES.renamed,
        ("mlp.router", "mlp.gate"),
        ("mlp.choice_bias", "mlp.moe_statics.e_score_correction_bias"),
        ("mlp.shared_expert", "mlp.shared_experts"),
    ),
    ignored=(*LLAMA_NAMES.ignored, "model.mtp_*"),
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    is_moe = architecture == "Ernie4_5_MoeForCausalLM"
    rope, norm = parse_rope(fields, theta=5e5), parsing.rms_norm(fields)
    bias = fields.boolean("use_bias", default=False)
    attention = parsing.attention(
        parsing.heads(fields, num_kv_heads=4 if is_moe else 2, head_dim=None if is_moe else 128),
        rope,
        rotary_interleaved=True,
        qkv_bias=bias,
        output_bias=bias,
    )
    activation = parsing.gated_activation(fields)
    dense = Gated(fields.integer("intermediate_size"), activation, bias=bias)
    count = parsing.num_layers(fields)
    experts = _experts(fields) if is_moe else None
    mixed = _mixed_layers(fields) if is_moe else range(0)
    return parsing.model_spec(
        fields,
        architecture,
        [
            LayerSpec(attention, experts if experts and i in mixed else dense, norm)
            for i in range(count)
        ],
        norm,
        tensor_names=_MOE_NAMES if is_moe else LLAMA_NAMES,
        tie_word_embeddings=True,
    )


def _experts(fields: Fields) -> MoE:
    parsing.refuse(fields, use_bias=False)
    size = fields.integer("moe_intermediate_size")
    return MoE(
        *parsing.experts(fields.calling(num_experts_per_tok="moe_k"), "moe_num_experts"),
        size,
        parsing.gated_activation(fields),
        chooses_by_bias=True,
        shared_size=size * fields.integer("moe_num_shared_experts", default=2, minimum=0),
        shared_is_gated=False,
    )


def _mixed_layers(fields: Fields) -> range:
    """Return the layers that are mixtures."""
    every = fields.integer("moe_layer_interval", default=1)
    count = parsing.num_layers(fields)
    first = fields.integer("moe_layer_start_index", default=1, minimum=0)
    last = fields.integer("moe_layer_end_index", default=-1, minimum=-1)
    start = -(-(first + 1) // every) * every - 1  # the first that is a multiple, counted from 1
    return range(start, count if last == -1 else last + 1, every)
