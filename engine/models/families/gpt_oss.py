"""gpt-oss: experts with biases and a clamped SwiGLU, sinks, and windows in every other layer."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import LayerSpec, ModelSpec, MoE
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

_NAMES = TensorNames(renamed=LLAMA_NAMES.renamed, experts="gates and ups")

# The value of all its checkpoints, should one leave it out.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    parsing.refuse(fields, hidden_act="silu")
    fields = fields.over({"rope_parameters": _ROPE})
    rope, norm = parse_rope(fields, theta=150_000.0), parsing.rms_norm(fields)
    heads = parsing.heads(fields, num_kv_heads=8, head_dim=64)
    bias = fields.boolean("attention_bias", default=True)
    size = parsing.window(fields, absent=128)
    moe = MoE(
        *parsing.experts(fields, "num_local_experts"),
        fields.integer("intermediate_size"),
        alpha=float(fields.number("swiglu_alpha", default=1.702)),
        limit=float(fields.number("swiglu_limit", default=7.0)),
        up_offset=1.0,
        bias=True,
    )
    layers = [
        LayerSpec(
            parsing.attention(
                heads,
                rope,
                window=size if kind == parsing.SLIDING else None,
                has_sinks=True,
                qkv_bias=bias,
                output_bias=bias,
            ),
            moe,
            norm,
        )
        for kind in parsing.layer_types(fields) or parsing.alternating(fields, every=2)
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
        context_length=fields.integer("max_position_embeddings"),
        tensor_names=_NAMES,
    )
