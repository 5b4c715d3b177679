"""EXAONE 4: norms after attention and MLP, and of queries and keys; windows, in larger models.

There, layers without a window have no rope.
"""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.families import olmo2
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    heads = parsing.heads(fields, num_kv_heads=32)
    size = parsing.window(fields, absent=4096)
    mlp = Gated(fields.integer("intermediate_size"), parsing.gated_activation(fields))
    layers = [
        LayerSpec(
            parsing.attention(
                heads,
                rope if size is None or kind == parsing.SLIDING else None,
                window=size if kind == parsing.SLIDING else None,
                qk_norm=norm,
            ),
            mlp,
            norm,
            "post",
        )
        for kind in parsing.layer_types(fields) or _layer_types(fields, size)
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
        tensor_names=olmo2.NAMES,
    )


def _layer_types(fields: Fields, size: int | None) -> list[str]:
    """Return layer types, of a period or of letters for local and global layers, as LLLG."""
    field, count = "sliding_window_pattern", parsing.num_layers(fields)
    if size is None:
        return [parsing.FULL] * count
    if not isinstance(fields.raw(field), str):
        return parsing.alternating(fields, every=fields.integer(field, default=4))
    letters = fields.text(field)
    if not letters or not set(letters) <= {"L", "G"}:
        raise fields.error(field, f"must be a number, or letters L and G (got {letters!r})")
    kinds = [parsing.SLIDING if letter == "L" else parsing.FULL for letter in letters]
    return [kinds[i % len(kinds)] for i in range(count)]
