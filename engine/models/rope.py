"""Reads the rope settings of a `config.json`, in either spelling of them."""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.fields import Fields
from engine.layers.rope import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    QueryScaling,
    Rope,
    YarnRope,
)

_DEFAULT_THETA = 10_000.0
_MOST_FACTOR = 2**20  # beyond all models by far, and far from what float32 cannot express


def parse_rope(
    config: Fields,
    *,
    layer_type: str | None = None,
    theta: float = _DEFAULT_THETA,
    is_partial: bool = False,
) -> Rope:
    """Read the rope settings of a `config.json`.

    Accepts `rope_theta` with `rope_scaling` (`type` or `rope_type`), and `rope_parameters` of
    transformers 5, with the precedence transformers gives them.

    Args:
        layer_type: of the layers whose settings are wanted, where each type has its own.
        theta: where the field is absent.
        is_partial: whether the family may rotate only a part of each head; see `rotary_dim`.

    Raises:
        UnsupportedError: an unknown scaling, settings per layer type or a part of each head where
            the family has none.
        CheckpointError: a field is missing or wrong.
    """
    max_positions = config.integer("max_position_embeddings")
    rope = _rope_fields(config, layer_type)
    for field in rope.names():
        if isinstance(rope.raw(field), dict):
            raise rope.unsupported(field, "settings per layer type are not supported")
    if not is_partial and _partial_factor(config, rope, 1.0) != 1.0:
        raise config.unsupported("partial_rotary_factor", "below 1 is not supported")
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind not in _PARSERS:
        raise rope.unsupported(
            "rope_type", f"{kind!r} is not supported; supported: {', '.join(_PARSERS)}"
        )
    theta = rope.number("rope_theta", default=config.number("rope_theta", default=theta))
    if theta <= 1:
        raise config.error("rope_theta", f"must exceed 1 (got {theta:g})")
    # Some checkpoints keep the length of the original training beside the rope settings.
    name = "original_max_position_embeddings"
    original = config.integer(
        name, default=rope.integer(name, default=max_positions, minimum=2), minimum=2
    )
    return _PARSERS[kind](rope, float(theta), original, max_positions)


def parse_rope_by_layer_type(
    config: Fields, *, theta: float, sliding_theta: float, sliding_field: str = "rope_theta"
) -> dict[str, Rope]:
    """Read the rope settings of a family that scales those of layers without a window alone.

    Accepts `rope_parameters` by layer type, and the older `rope_theta` and `rope_scaling`.

    Args:
        theta, sliding_theta: where they are absent.
        sliding_field: of the layers with a window, in the older form.
    """
    full, sliding = "full_attention", "sliding_attention"
    if "rope_parameters" in config:
        # `rope_scaling` goes before it, where a family has one kind of layer.
        config = config.without("rope_scaling")
        local_config = config.calling(rope_theta=sliding_field)
        return {
            full: parse_rope(config, layer_type=full, theta=theta),
            sliding: parse_rope(local_config, layer_type=sliding, theta=sliding_theta),
        }
    local = float(config.number(sliding_field, default=sliding_theta))
    return {full: parse_rope(config, theta=theta), sliding: DefaultRope(local)}


def parse_query_scaling(config: Fields) -> QueryScaling:
    """Read how the queries of Ministral 3 grow, beside its rope settings.

    Raises:
        CheckpointError: a field is missing or wrong.
    """
    rope = _rope_fields(config, None)
    original = rope.integer("original_max_position_embeddings")
    return QueryScaling(float(rope.number("llama_4_scaling_beta")), original)


def check_factors(config: Fields, rope: Rope | None, dim: int) -> None:
    """Raise `CheckpointError` if a LongRoPE has not a factor for each frequency of `dim`."""
    if isinstance(rope, LongRope):
        for field in ("short_factor", "long_factor"):
            count = len(getattr(rope, field))
            if count != dim // 2:
                problem = f"{field} must have {dim // 2} factors, for {dim} rotated dimensions"
                raise config.error("rope_parameters", f"{problem} (got {count})")


def rotary_dim(config: Fields, head_dim: int, *, factor: float = 1.0) -> int:
    """Return how many dimensions of a head are rotated.

    Args:
        factor: `partial_rotary_factor` where the field is absent.
    """
    share = _partial_factor(config, _rope_fields(config, None), factor)
    dim = int(head_dim * share) if share <= 1 else 0
    if dim % 2 or dim < 1:
        raise config.error(
            "partial_rotary_factor",
            f"must give an even number of rotated dimensions, out of {head_dim}",
        )
    return dim


def _rope_fields(config: Fields, layer_type: str | None) -> Fields:
    source = config.child("rope_scaling") or config.child("rope_parameters")
    if source is not None and layer_type is not None:
        source = source.child(layer_type)
    return source or Fields({}, name="config.json: rope_parameters")


def _partial_factor(config: Fields, rope: Fields, absent: float) -> float:
    own = config.number("partial_rotary_factor", default=absent)
    return float(rope.number("partial_rotary_factor", default=own))


def _factor(rope: Fields) -> float:
    factor = rope.number("factor")
    if factor > _MOST_FACTOR:
        raise rope.error("factor", f"must be at most {_MOST_FACTOR} (got {factor:g})")
    return factor


def _default(_rope: Fields, theta: float, _original: int, _max_positions: int) -> Rope:
    return DefaultRope(theta)


def _linear(rope: Fields, theta: float, _original: int, _max_positions: int) -> Rope:
    return LinearRope(theta, _factor(rope))


def _dynamic(rope: Fields, theta: float, _original: int, max_positions: int) -> Rope:
    return DynamicRope(theta, _factor(rope), max_positions)


def _yarn(rope: Fields, theta: float, original: int, max_positions: int) -> Rope:
    # A factor of null means the ratio of the lengths.
    ratio = max_positions / original
    factor = ratio if rope.is_null("factor") else _factor(rope)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max_positions=original,
        attention_factor=rope.number("attention_factor", default=None),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=rope.number("mscale", default=None, or_zero=True),
        mscale_all_dim=rope.number("mscale_all_dim", default=None, or_zero=True),
        truncate=rope.boolean("truncate", default=True),
    )


def _llama3(rope: Fields, theta: float, original: int, _max_positions: int) -> Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"must exceed low_freq_factor ({high} <= {low})")
    return Llama3Rope(theta, _factor(rope), low, high, original)


def _long(rope: Fields, theta: float, original: int, max_positions: int) -> Rope:
    ratio = rope.number("factor", default=max_positions / original)
    scale = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    return LongRope(
        theta,
        rope.numbers("short_factor"),
        rope.numbers("long_factor"),
        original,
        rope.number("attention_factor", default=scale),
    )


_PARSERS: dict[str, Callable[[Fields, float, int, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _long,
    "mrope": _default,  # by sections for images: of a text it is the same
    "su": _long,  # what it was called before
}
