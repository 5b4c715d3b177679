"""Phi-3, 3.5 and 4: Llama with fused tensors, LongRoPE and partial rotary."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope, rotary_dim
from engine.models.spec import Gated, LayerSpec, ModelSpec
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

_NAMES = TensorNames(renamed=LLAMA_NAMES.renamed, stacked=("qkv_proj", "gate_up_proj"))


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields, is_partial=True), parsing.rms_norm(fields)
    heads = parsing.heads(fields)
    attention = parsing.attention(
        heads,
        rope,
        rotary_dim=rotary_dim(fields, heads.head_dim),
        window=parsing.window(fields, absent=None),
    )
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields),
        norm,
        tensor_names=_NAMES,
    )
