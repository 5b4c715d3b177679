"""Granite 3 with a mixture of experts, and Granite 4, with Mamba 2 in some layers or without.

An expert that every token goes through has no gate. Granite 4 may have that alone.
"""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.families.bamba import MAMBA_NAMES, mamba2
from engine.models.families.granite import granite
from engine.models.rope import parse_rope
from engine.models.spec import Gated, ModelSpec, MoE, SSDSpec
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
        *MAMBA_NAMES,
    ),
    stacked=("gate_up_proj",),
    experts="gates and ups",
    outputs_first=True,
    gates_first=True,
)
_HYBRID = "GraniteMoeHybridForCausalLM"
_ATTENTION = ("attention", parsing.FULL)
_MAMBA = ("mamba", "linear_attention")


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    fields = fields.over({"num_experts_per_tok": 2})
    mlp, rope = _mlp(fields, architecture), parse_rope(fields)
    if architecture != _HYBRID:
        return granite(fields, architecture, mlp, rope, _NAMES)
    # Older checkpoints have another name for the field.
    if "layers_block_type" in fields:
        fields = fields.calling(layer_types="layers_block_type")
    kinds = parsing.layer_types(fields, (*_MAMBA, *_ATTENTION))
    if kinds is None:
        kinds = [_MAMBA[0]] * parsing.num_layers(fields)
    mixers: list[SSDSpec | None] = [None] * len(kinds)
    if set(kinds) & set(_MAMBA):
        mamba = mamba2(fields)
        mixers = [mamba if kind in _MAMBA else None for kind in kinds]
    rotates = fields.raw("position_embedding_type") == "rope"
    fields = fields.without("layer_types")  # of which others have windows
    return granite(fields, architecture, mlp, rope if rotates else None, _NAMES, mixers)


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
