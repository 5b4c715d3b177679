"""Granite 3: Llama with multipliers of embeddings, scores, residual additions and logits."""

from __future__ import annotations

from collections.abc import Sequence

from engine.fields import Fields
from engine.layers.rope import Rope
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec, MoE, SSDSpec
from engine.models.tensor_names import LLAMA_NAMES, TensorNames


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    mlp = Gated(
        fields.integer("intermediate_size"),
        parsing.gated_activation(fields),
        bias=fields.boolean("mlp_bias", default=False),
    )
    return granite(fields, architecture, mlp, parse_rope(fields))


def granite(
    fields: Fields,
    architecture: str,
    mlp: Gated | MoE,
    rope: Rope | None,
    tensor_names: TensorNames = LLAMA_NAMES,
    mixers: Sequence[SSDSpec | None] | None = None,
) -> ModelSpec:
    """Make the spec of a model with Granite's multipliers.

    Args:
        mixers: of each layer, what it has in place of attention; None: nothing.
    """
    norm, bias = parsing.rms_norm(fields), fields.boolean("attention_bias", default=False)
    attention = parsing.attention(
        parsing.heads(fields),
        rope,
        scale=float(fields.number("attention_multiplier", default=1.0)),
        qkv_bias=bias,
        output_bias=bias,
    )
    multiplier = float(fields.number("residual_multiplier", default=1.0))
    layers = [
        LayerSpec(mixer or attention, mlp, norm, residual_multiplier=multiplier)
        for mixer in mixers or [None] * parsing.num_layers(fields)
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
        tensor_names=tensor_names,
        embedding_multiplier=float(fields.number("embedding_multiplier", default=1.0)),
        logit_multiplier=1.0 / fields.number("logits_scaling", default=1.0),
    )
