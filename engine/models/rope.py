"""Reads the rope settings of a `config.json`, in either spelling of them."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import UnsupportedError
from engine.layers.rope import DefaultRope, DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope
from engine.models.fields import Fields

_DEFAULT_THETA = 10_000.0


def parse_rope(config: Fields) -> Rope:
    """Read the rope settings of a `config.json`.

    Accepts `rope_theta` with `rope_scaling` (`type` or `rope_type`), and `rope_parameters` of
    transformers 5, with the precedence transformers gives them.

    Raises:
        UnsupportedError: an unknown scaling, or one that rotates only a part of each head.
        CheckpointError: a field is missing or wrong.
    """
    max_positions = config.integer("max_position_embeddings")
    source = config.child("rope_scaling") or config.child("rope_parameters")
    rope = source or Fields({}, name="config.json: rope_parameters")
    for field in rope.names():
        if isinstance(rope.raw(field), dict):
            raise UnsupportedError(f"config.json: rope per layer type ({field}) is not supported")
    for fields in (rope, config):
        if fields.number("partial_rotary_factor", default=1.0) != 1.0:
            raise UnsupportedError("config.json: partial_rotary_factor below 1 is not supported")
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind not in _PARSERS:
        raise UnsupportedError(
            f"config.json: rope type {kind!r} is not supported; supported: {', '.join(_PARSERS)}"
        )
    theta = rope.number("rope_theta", default=config.number("rope_theta", default=_DEFAULT_THETA))
    # Some checkpoints keep the length of the original training beside the rope settings.
    original = config.integer(
        "original_max_position_embeddings",
        default=rope.integer("original_max_position_embeddings", default=max_positions),
    )
    return _PARSERS[kind](rope, float(theta), original, max_positions)


def _default(_rope: Fields, theta: float, _original: int, _max_positions: int) -> Rope:
    return DefaultRope(theta)


def _linear(rope: Fields, theta: float, _original: int, _max_positions: int) -> Rope:
    return LinearRope(theta, rope.number("factor"))


def _dynamic(rope: Fields, theta: float, _original: int, max_positions: int) -> Rope:
    return DynamicRope(theta, rope.number("factor"), max_positions)


def _yarn(rope: Fields, theta: float, original: int, max_positions: int) -> Rope:
    # A factor of null means the ratio of the lengths.
    ratio = max_positions / original
    factor = ratio if rope.is_null("factor") else rope.number("factor")
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max_positions=original,
        attention_factor=rope.number("attention_factor", default=None),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=rope.number("mscale", default=None),
        mscale_all_dim=rope.number("mscale_all_dim", default=None),
        truncate=rope.boolean("truncate", default=True),
    )


def _llama3(rope: Fields, theta: float, original: int, _max_positions: int) -> Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"must exceed low_freq_factor ({high} <= {low})")
    return Llama3Rope(theta, rope.number("factor"), low, high, original)


_PARSERS: dict[str, Callable[[Fields, float, int, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
