"""LLaVA 1.5 and 1.6 and Pixtral, their text: decoders of other families beside a vision part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from engine.fields import Fields
from engine.models import parsing
from engine.models.families import llama, mistral, qwen2
from engine.models.spec import ModelSpec


class _Text(NamedTuple):
    """How the fields of a text part are read, and what they are where they are absent."""

    parse: Callable[[Fields, str], ModelSpec]
    defaults: Mapping[str, Any]


_COMMON = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}
_LLAMA = {
    **_COMMON,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}
_MISTRAL = {
    **_COMMON,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
}
_QWEN2 = {
    **_COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}
_TEXTS = {  # by `model_type`
    "llama": _Text(llama.parse, _LLAMA),
    "mistral": _Text(mistral.parse, _MISTRAL),
    "qwen2": _Text(qwen2.parse, _QWEN2),
}


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    own, both = fields.child("text_config"), parsing.text_part(fields)
    if own is None or both is None:
        raise fields.error("text_config", "is missing")
    kind = own.text("model_type", default="llama")
    if kind not in _TEXTS:
        problem = f"{kind!r} is not supported; supported: {', '.join(_TEXTS)}"
        raise own.unsupported("model_type", problem)
    text = _TEXTS[kind]
    spec = text.parse(both.without("text_config").over(text.defaults), architecture)
    names = spec.tensor_names.beside_vision()
    names = replace(names, ignored=(*names.ignored, "image_newline", "model.image_newline"))
    return replace(spec, tensor_names=names)
