"""Rotary tables: cos and sin of every position, for each rope scaling.

The frequencies follow the papers named in `engine.layers.rope`, with the arithmetic of
transformers, so that float32 logits agree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

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


class Rotation(NamedTuple):
    """What a step's queries and keys are rotated by.

    Attributes:
        cos, sin: float32 [T, rotary_dim / 2].
        query_scale: float32 [T], factors of the queries; None: 1.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None


class RotaryEmbedding(nn.Module):
    """cos and sin of positions 0 .. max_model_len - 1, precomputed in float32.

    Args:
        rope: None: a rotation by nothing.
        query_scaling: of the queries at these positions; None: there is none.
    """

    query_scale: Tensor | None

    def __init__(
        self,
        rope: Rope | None,
        rotary_dim: int,
        max_model_len: int,
        *,
        query_scaling: QueryScaling | None = None,
        device: torch.device,
    ) -> None:
        super().__init__()
        if device.type == "meta":  # where torch.arange would import its compiler, which takes long
            width = 1 if rope is None else rotary_dim // 2
            cos = sin = torch.empty(max_model_len, width, device=device)
        elif rope is None:
            cos, sin = torch.ones(max_model_len, 1), torch.zeros(max_model_len, 1)
        else:
            with torch.device("cpu"):  # whose functions give every device the same table
                cos, sin = rotary_table(rope, rotary_dim, max_model_len)
        self.cos = nn.Buffer(cos.to(device), persistent=False)
        self.sin = nn.Buffer(sin.to(device), persistent=False)

        scale = None
        if query_scaling is not None and query_scaling.original_max_positions < max_model_len:
            with torch.device("cpu"):
                scale = _query_scale(query_scaling, max_model_len).to(device)
        self.register_buffer("query_scale", scale, persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """Return the rows at int64 `positions` [T]."""
        scale = None if self.query_scale is None else self.query_scale[positions]
        return Rotation(self.cos[positions], self.sin[positions], scale)


def rotary_table(rope: Rope, rotary_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each float32 [length, rotary_dim / 2], on torch's default device.

    With dynamic scaling the base depends on the length of the sequence. Row p has the base of a
    sequence whose newest token is p, so that the keys of a position depend neither on the later
    length of its sequence nor on its chunks: prefixes can be shared. Transformers agrees for every
    prompt within the original length, whatever is generated beyond it. With LongRoPE the factors of
    long contexts serve every sequence if `length`, the longest that is served, is beyond the
    original one. Transformers chooses by the sequence, and agrees for those on the same side.
    """
    scale = 1.0
    match rope:
        case DefaultRope(theta):
            frequencies = _inverse_frequencies(theta, rotary_dim)
        case LinearRope(theta, factor):
            frequencies = _inverse_frequencies(theta, rotary_dim) / factor
        case DynamicRope():
            frequencies = _dynamic(rope, rotary_dim, length)
        case YarnRope():
            frequencies, scale = _yarn(rope, rotary_dim), _yarn_scale(rope)
        case Llama3Rope():
            frequencies = _llama3(rope, rotary_dim)
        case LongRope():
            frequencies, scale = _long(rope, rotary_dim, length), rope.attention_factor
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * scale, angles.sin() * scale


def _query_scale(scaling: QueryScaling, length: int) -> Tensor:
    lengths = torch.arange(length) // scaling.original_max_positions
    return 1 + scaling.beta * torch.log1p(lengths.float())


def _inverse_frequencies(theta: float | Tensor, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _dynamic(rope: DynamicRope, dim: int, length: int) -> Tensor:
    """Return the frequencies of every position, [length, dim / 2]."""
    original = rope.original_max_positions
    lengths = torch.arange(1, length + 1).clamp(min=original)[:, None]
    growth = (rope.factor * lengths / original) - (rope.factor - 1)
    return _inverse_frequencies(rope.theta * growth ** (dim / (dim - 2)), dim)


def _yarn(rope: YarnRope, dim: int) -> Tensor:
    def boundary(rotations: float) -> float:
        """Dimension that rotates `rotations` times over the original length."""
        wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = boundary(rope.beta_fast), boundary(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    wavelengths = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_scale(rope: YarnRope) -> float:
    """Return the factor of cos and sin that keeps the entropy of the attention."""

    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _long(rope: LongRope, dim: int, length: int) -> Tensor:
    is_long = length > rope.original_max_positions
    factors = torch.tensor(rope.long_factor if is_long else rope.short_factor)
    return 1.0 / (factors * rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(rope: Llama3Rope, dim: int) -> Tensor:
    frequencies = _inverse_frequencies(rope.theta, dim)
    wavelengths = 2 * math.pi / frequencies
    original, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / rope.factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)
