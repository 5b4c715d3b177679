"""Qwen 2 VL, 2.5 VL and 3 VL, their text: the decoders of Qwen 2 and 3.

Of a text all three positions of a token are the same: rope by sections of them is the usual one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from engine.fields import Fields
from engine.models import parsing
from engine.models.families import qwen2, qwen3, qwen_moe
from engine.models.spec import ModelSpec
from engine.models.tensor_names import TensorNames


class _Text(NamedTuple):
    """How the fields of a text part are read, and what they are where they are absent."""

    parse: Callable[[Fields, str], ModelSpec]
    defaults: dict[str, Any]


_QWEN2 = _Text(qwen2.parse, {"num_key_value_heads": 8, "max_window_layers": 80, "rope_theta": 1e6})
_TEXTS = {
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3VLForConditionalGeneration": _Text(qwen3.parse, {"rope_theta": 5e5}),
    "Qwen3VLMoeForConditionalGeneration": _Text(
        qwen_moe.parse, {"num_key_value_heads": 16, "rope_theta": 5e5}
    ),
}


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    text = _TEXTS[architecture]
    # Older checkpoints have the text's fields beside a part for the vision.
    fields = (parsing.text_part(fields) or fields).over(text.defaults)
    if architecture == "Qwen3VLMoeForConditionalGeneration":
        parsing.refuse(fields, norm_topk_prob=True)
        fields = fields.over({"norm_topk_prob": True})
    spec = text.parse(fields, architecture)
    return replace(spec, tensor_names=_beside_vision(spec.tensor_names, architecture))


def _beside_vision(names: TensorNames, architecture: str) -> TensorNames:
    is_stacked = architecture == "Qwen3VLMoeForConditionalGeneration"
    return replace(
        names,
        prefixes=("model.language_model.", "model."),
        ignored=(*names.ignored, "visual.*", "model.visual.*"),
        experts="gates and ups" if is_stacked else "each",
        outputs_first=None,  # as transformers 5 writes them; Qwen's have inputs first
        gates_first=is_stacked,
    )
