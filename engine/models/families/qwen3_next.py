"""Qwen3-Next: the layers of Qwen 3.5, with experts in most, and projections by key head."""

from __future__ import annotations

from dataclasses import replace

from engine.fields import Fields
from engine.models import parsing
from engine.models.families.qwen3_5 import (
    LINEAR,
    NAMES,
    delta,
    gated_attention,
    kinds,
    mixture,
)
from engine.models.families.qwen_moe import sparse_layers
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    norm = parsing.rms_norm(fields, unit_offset=True)
    attention = gated_attention(fields, norm, num_kv_heads=2)
    linear = replace(delta(fields), by_key_head=True)
    moe = mixture(fields, num_experts=512, num_chosen=10)
    dense = Gated(fields.integer("intermediate_size", default=5632))
    layers = [
        LayerSpec(linear if kind == LINEAR else attention, moe if is_sparse else dense, norm)
        for kind, is_sparse in zip(kinds(fields), sparse_layers(fields), strict=True)
    ]
    return parsing.model_spec(fields, architecture, layers, norm, tensor_names=NAMES)
