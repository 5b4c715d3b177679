"""OLMoE: a mixture of experts, and norms over all queries and all keys."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import LayerSpec, ModelSpec, MoE
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

_NAMES = TensorNames(renamed=(*LLAMA_NAMES.renamed, ("mlp.router", "mlp.gate")))


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    parsing.refuse(fields, clip_qkv=None)
    fields = fields.over({"num_experts_per_tok": 8})
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    bias = fields.boolean("attention_bias", default=False)
    attention = parsing.attention(
        parsing.heads(fields),
        rope,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=norm,
        qk_norm_is_wide=True,
    )
    moe = MoE(
        *parsing.experts(fields, "num_experts", absent=64),
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields),
        normalizes=fields.boolean("norm_topk_prob", default=False),
    )
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, moe, norm)] * parsing.num_layers(fields),
        norm,
        tensor_names=_NAMES,
    )
