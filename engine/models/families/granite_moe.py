"""Granite 3 with a mixture of experts, and Granite 4 without Mamba.

An expert that every token goes through has no gate. Granite 4 may have that alone.
"""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.families.granite import granite
from engine.models.rope import parse_rope
from engine.models.spec import Gated, ModelSpec, MoE
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

_NAMES = TensorNames(
    renamed=(
        *LLAMA_NAMES.renamed,
        ("mlp.router", "block_sparse_moe.router.layer"),
        ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
        ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
        ("mlp.shared_expert.gate_up_proj", "shared_mlp.input_linear"),
        ("mlp.shared_expert.down_proj", "shared_mlp.output_linear"),
        ("mlp.gate_up_proj", "shared_mlp.input_linear"),
        ("mlp.down_proj", "shared_mlp.output_linear"),
    ),
    stacked=("gate_up_proj",),
    experts="gates and ups",
    outputs_first=True,
    gates_first=True,
)
_HYBRID = "GraniteMoeHybridForCausalLM"
_ATTENTION = {"attention", parsing.FULL}


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    fields = fields.over({"num_experts_per_tok": 2})
    mlp, rope = _mlp(fields, architecture), parse_rope(fields)
    if architecture != _HYBRID:
        return granite(fields, architecture, mlp, rope, _NAMES)
    kinds = fields.texts("layer_types")
    if kinds is None or not set(kinds) <= _ATTENTION:
        raise fields.unsupported(
            "layer_types", "is supported only if all layers are attention layers"
        )
    rotates = fields.raw("position_embedding_type") == "rope"
    fields = fields.without("layer_types")  # of which others have windows
    return granite(fields, architecture, mlp, rope if rotates else None, _NAMES)


def _mlp(fields: Fields, architecture: str) -> Gated | MoE:
    activation, shared_size = parsing.gated_activation(fields), 0
    if architecture == _HYBRID:
        shared_size = fields.integer("shared_intermediate_size", default=1024)
        if fields.raw("num_local_experts") == 0:
            return Gated(shared_size, activation)
    elif architecture == "GraniteMoeSharedForCausalLM":
        shared_size = fields.integer("shared_intermediate_size", default=0, minimum=0)
    return MoE(
        *parsing.experts(fields, "num_local_experts", absent=8),
        fields.integer("intermediate_size"),
        activation,
        shared_size=shared_size,
        shared_is_gated=False,
    )
