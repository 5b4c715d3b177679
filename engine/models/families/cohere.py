"""Command R, and from Command R7B on: attention and MLP in parallel behind a layer norm.

The later ones have windows, and no rope in the layers without one.
"""

from __future__ import annotations

from dataclasses import replace

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec
from engine.models.tensor_names import TensorNames

_NAMES = TensorNames(renamed=(("attention_norm", "input_layernorm"),))


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    parsing.refuse(fields, use_qk_norm=False, use_parallel_block=True)
    rope = parse_rope(fields, theta=5e5 if architecture == "CohereForCausalLM" else 1e4)
    norm = replace(parsing.layer_norm(fields), has_bias=False)
    heads = parsing.heads(fields)
    bias = fields.boolean("attention_bias", default=False)
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    layers = [
        LayerSpec(
            parsing.attention(
                heads,
                rope if rotates else None,
                rotary_interleaved=True,
                window=window,
                qkv_bias=bias,
                output_bias=bias,
            ),
            mlp,
            norm,
            "parallel",
        )
        for window, rotates in _kinds(fields, architecture)
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
        tensor_names=_NAMES,
        tie_word_embeddings=True,
        logit_multiplier=float(fields.number("logit_scale", default=0.0625)),
    )


def _kinds(fields: Fields, architecture: str) -> list[tuple[int | None, bool]]:
    """Return of each layer its window, and whether it has rope."""
    if architecture == "CohereForCausalLM":
        return [(None, True)] * parsing.num_layers(fields)
    size = parsing.window(fields, absent=4096)
    every = fields.integer("sliding_window_pattern", default=4)
    types = parsing.layer_types(fields) or parsing.alternating(fields, every=every)
    # As in transformers, a layer has rope if it has a window.
    windows = [size if kind == parsing.SLIDING else None for kind in types]
    return [(window, window is not None) for window in windows]
