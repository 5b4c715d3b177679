"""GLM-4.5 and later: mixtures of experts behind a few dense layers, chosen with a bias.

The layer for speculative decoding, behind the last one, is left out.
"""

from __future__ import annotations

from dataclasses import replace

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope, rotary_dim
from engine.models.spec import Gated, LayerSpec, ModelSpec, MoE
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

_NAMES = TensorNames(
    renamed=(
        *LLAMA_NAMES.renamed,
        ("mlp.router", "mlp.gate"),
        ("mlp.choice_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.shared_expert", "mlp.shared_experts"),
    )
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    parsing.refuse(fields, n_group=1)
    rope, norm = parse_rope(fields, is_partial=True), parsing.rms_norm(fields)
    heads = parsing.heads(fields, num_kv_heads=8)
    attention = parsing.attention(
        heads,
        rope,
        rotary_dim=rotary_dim(fields, heads.head_dim, factor=0.5),
        qkv_bias=fields.boolean("attention_bias", default=False),
        qk_norm=norm if fields.boolean("use_qk_norm", default=False) else None,
    )
    activation = parsing.gated_activation(fields)
    size = fields.integer("moe_intermediate_size")
    moe = MoE(
        *parsing.experts(fields, "n_routed_experts"),
        size,
        activation,
        scores="sigmoid",
        chooses_by_bias=True,
        normalizes=fields.boolean("norm_topk_prob", default=True),
        weight_scale=float(fields.number("routed_scaling_factor", default=1.0)),
        shared_size=size * fields.integer("n_shared_experts", default=1),
        shared_is_gated=False,
    )
    dense = Gated(fields.integer("intermediate_size"), activation)
    count = parsing.num_layers(fields)
    num_dense = fields.integer("first_k_dense_replace", default=1, minimum=0)
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, dense if i < num_dense else moe, norm) for i in range(count)],
        norm,
        tensor_names=replace(_NAMES, ignored=(*_NAMES.ignored, f"model.layers.{count}.*")),
    )
