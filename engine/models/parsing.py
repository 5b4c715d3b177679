"""What the families' `parse` functions share: fields of a `config.json` that many of them have.

Every quirk of the Hugging Face format is handled here, in `engine.models.rope` and in the families'
files. Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from engine.fields import Fields
from engine.layers.rope import DynamicRope, LinearRope, Rope, YarnRope
from engine.models.rope import check_factors
from engine.models.spec import (
    AttentionSpec,
    GatedActivation,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PlainActivation,
)
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

FULL = "full_attention"
SLIDING = "sliding_attention"
NO_WINDOWS = {"use_sliding_window": False}  # where the field switches them on

MOST_TAPS = 256  # of a short convolution; that of all models is at most 4 or so

_MOST_LAYERS = 4096  # more than the largest models have by far
_MOST_EXPERTS = 4096  # that `kernels.experts.routing` takes

_DTYPES = ("float32", "bfloat16", "float16")
_PLAIN_ACTIVATIONS: dict[str, PlainActivation] = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_GATED_ACTIVATIONS: dict[str, GatedActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

T = TypeVar("T")


class Heads(NamedTuple):
    """Sizes of an attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def model_spec(
    fields: Fields,
    architecture: str,
    layers: Iterable[LayerSpec],
    norm: NormSpec,
    *,
    context_length: int | None = None,
    tensor_names: TensorNames = LLAMA_NAMES,
    tie_word_embeddings: bool = False,
    **others: Any,
) -> ModelSpec:
    """Make the spec of a model, with what every family has.

    Args:
        context_length: in tokens; None: `max_position_embeddings`, as the layers' ropes extend it.
        tie_word_embeddings: where the field is absent.
        others: attributes that few models have.
    """
    layers = tuple(layers)
    if not any(isinstance(layer.mixer, AttentionSpec) for layer in layers):
        raise fields.unsupported(
            "layer_types", "must have a layer with attention; a model without one is not supported"
        )
    if context_length is None:
        context_length = max(
            _scaled_context_length(fields, each.mixer.rope)
            for each in layers
            if isinstance(each.mixer, AttentionSpec)
        )
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        norm=norm,
        context_length=context_length,
        dtype=_dtype(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=tie_word_embeddings),
        eos_token_ids=fields.integers("eos_token_id"),
        tensor_names=tensor_names,
        **others,
    )
    _check_layer_types(fields, spec.layers)
    for attention in spec.attentions:
        check_factors(fields, attention.rope, attention.rotary_dim)
    if any(not 0 <= token < spec.vocab_size for token in spec.eos_token_ids):
        raise fields.error("eos_token_id", f"must be below vocab_size {spec.vocab_size}")
    return spec


def text_part(fields: Fields) -> Fields | None:
    """Return the fields of the text part of a model that has others; None where it has none."""
    text = fields.child("text_config")
    if text is None:
        return None
    # The whole model's field decides whether its head is tied, whatever the part's own is: both are
    # wrong in some checkpoints (`as_stored`).
    names = ("tie_word_embeddings", "tie_embedding")
    if any(name in fields for name in names):
        for name in names:
            text = text.without(name)
    return fields.under(text)


def num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=_MOST_LAYERS)


def max_positions(fields: Fields) -> int:
    return fields.integer("max_position_embeddings")


def heads(fields: Fields, *, num_kv_heads: int | None = None, head_dim: int | None = None) -> Heads:
    """Read the sizes of the attention.

    Args:
        num_kv_heads, head_dim: where the field is absent; None derives it from the number of heads.
    """
    num_heads = fields.integer("num_attention_heads")
    absent = num_heads if fields.is_null("num_key_value_heads") else num_kv_heads
    num_kv_heads = fields.integer("num_key_value_heads", default=absent or num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads",
            f"must divide num_attention_heads ({num_heads} % {num_kv_heads} != 0)",
        )
    return Heads(num_heads, num_kv_heads, _head_dim(fields, head_dim, num_heads))


def _head_dim(fields: Fields, absent: int | None, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if "head_dim" not in fields and absent is None and hidden_size % num_heads:
        raise fields.error(
            "head_dim",
            f"is missing, and hidden_size is not a multiple of num_attention_heads ({num_heads})",
        )
    head_dim = fields.integer("head_dim", default=absent or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary embeddings (got {head_dim})")
    return head_dim


def attention(
    heads: Heads,
    rope: Rope | None,
    **others: Any,
) -> AttentionSpec:
    """Make the spec of an attention with the usual scale, and with rope on whole heads.

    Args:
        others: further attributes, or other values of these two.
    """
    usual = {"scale": heads.head_dim**-0.5, "rotary_dim": heads.head_dim}
    return AttentionSpec(*heads, rope=rope, **{**usual, **others})


def rms_norm(fields: Fields, *, unit_offset: bool = False) -> NormSpec:
    return NormSpec("rms", fields.number("rms_norm_eps"), unit_offset)


def layer_norm(
    fields: Fields, field: str = "layer_norm_eps", *, unit_offset: bool = False
) -> NormSpec:
    return NormSpec("layer", fields.number(field, default=1e-5), unit_offset)


def plain_activation(fields: Fields, field: str, *, absent: str) -> PlainActivation:
    """Read the activation of an MLP without gates."""
    return _activation(fields, field, absent, _PLAIN_ACTIVATIONS)


def gated_activation(
    fields: Fields, field: str = "hidden_act", *, absent: str = "silu"
) -> GatedActivation:
    """Read the activation of the gates."""
    return _activation(fields, field, absent, _GATED_ACTIVATIONS)


def _activation(fields: Fields, field: str, absent: str, supported: Mapping[str, T]) -> T:
    name = fields.text(field, default=absent)
    if name not in supported:
        problem = f"{name!r} is not supported; supported: {', '.join(supported)}"
        raise fields.unsupported(field, problem)
    return supported[name]


def experts(fields: Fields, field: str, *, absent: int | None = None) -> tuple[int, int]:
    """Return how many experts there are, which `field` has, and how many a token goes through.

    Args:
        absent: how many there are where the field is absent.
    """
    fields = fields if absent is None else fields.over({field: absent})
    count = fields.integer(field, maximum=_MOST_EXPERTS)
    chosen = fields.integer("num_experts_per_tok")
    if chosen > count:
        raise fields.error("num_experts_per_tok", f"must be at most {field} {count}")
    return count, chosen


def optional_number(fields: Fields, field: str, *, absent: float | None) -> float | None:
    """Read a number, which is `absent` where the field is, and None where it is null."""
    default = None if fields.is_null(field) else absent
    return fields.number(field, default=default)


def refuse(fields: Fields, **allowed: object) -> None:
    """Raise `UnsupportedError` if one of these fields is there with a value that is not `allowed`.

    A value that would change the output must not be ignored.
    """
    for field, value in allowed.items():
        if field in fields and fields.raw(field) != value:
            shown = json.dumps(fields.raw(field))
            raise fields.unsupported(field, f"{shown} is not supported; only {json.dumps(value)}")


def layer_types(fields: Fields, kinds: tuple[str, ...] = (FULL, SLIDING)) -> list[str] | None:
    """Return of which of `kinds` each layer is, by default with a window or without.

    None where the field is absent.
    """
    types = fields.texts("layer_types")
    count = num_layers(fields)
    if types is not None and (len(types) != count or not set(types) <= set(kinds)):
        problem = f"must give one of {', '.join(kinds)} for each of {count} layers"
        raise fields.error("layer_types", problem)
    return types


def alternating(fields: Fields, *, every: int) -> list[str]:
    """Return layer types where every `every`-th layer, and no other, has no window."""
    return [SLIDING if (i + 1) % every else FULL for i in range(num_layers(fields))]


def window(fields: Fields, *, absent: int | None) -> int | None:
    """Read `sliding_window`, which is `absent` where the field is, and None where it is null."""
    default = None if fields.is_null("sliding_window") else absent
    return fields.integer("sliding_window", default=default)


def switched_windows(fields: Fields) -> list[int | None]:
    """Return the windows of Qwen's layers, which a field switches on, from some layer on."""
    is_used = fields.boolean("use_sliding_window", default=False)
    size = window(fields, absent=4096) if is_used else None
    first = fields.integer("max_window_layers", default=28, minimum=0)
    types = layer_types(fields)
    if types is None:
        return [size if i >= first else None for i in range(num_layers(fields))]
    return [size if kind == SLIDING else None for kind in types]


def _check_layer_types(fields: Fields, layers: Sequence[LayerSpec]) -> None:
    """Raise unless `layer_types` has the same windows as `layers`, which all have attention."""
    if not all(isinstance(layer.mixer, AttentionSpec) for layer in layers):
        return
    types = layer_types(fields)
    if types is None or not fields.boolean("use_sliding_window", default=True):
        return
    if any(
        (kind == FULL) != (layer.attention.window is None)
        for kind, layer in zip(types, layers, strict=True)
    ):
        raise fields.unsupported("layer_types", "is not supported for this architecture")


def _scaled_context_length(fields: Fields, rope: Rope | None) -> int:
    """Return the context length in tokens; `rope` may extend what the model was trained for."""
    length = fields.integer("max_position_embeddings")
    match rope:
        case LinearRope(factor=factor) | DynamicRope(factor=factor):
            return int(length * factor)
        case YarnRope(factor=factor, original_max_positions=original):
            return max(length, int(original * factor))
        case _:
            return length


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", default=fields.text("torch_dtype", default="float32"))
    name = name.removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.unsupported(
            "dtype", f"{name!r} is not supported; supported: {', '.join(_DTYPES)}"
        )
    return name
