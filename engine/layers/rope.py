"""Scalings of rotary embeddings, one dataclass each; `engine.models.rope` reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """Unscaled rotary embedding (Su et al., RoFormer, 2021)."""

    theta: float


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor` (position interpolation, Chen et al., 2023)."""

    theta: float
    factor: float


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """A base that grows with the sequence beyond `original_max_positions` (dynamic NTK)."""

    theta: float
    factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al., 2023): interpolation by frequency.

    Attributes:
        attention_factor: scales cos and sin; None derives it from `factor` and the mscales.
        truncate: round the bounds of the ramp to whole dimensions.
    """

    theta: float
    factor: float
    original_max_positions: int
    attention_factor: float | None
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Scaling of Llama 3.1: long wavelengths divided by `factor`, short ones kept."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al., 2024): a factor per frequency, one list for each kind of context.

    Attributes:
        short_factor, long_factor: divide the frequencies in contexts of up to
            `original_max_positions`, and in longer ones.
        attention_factor: scales cos and sin in both.
    """

    theta: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries that grow with their position p, by 1 + `beta` ln(1 + p // `original_max_positions`).

    Scores stay as sharp in long contexts (Nakanishi, 2025; Llama 4 and Ministral 3).
    """

    beta: float
    original_max_positions: int


Rope = DefaultRope | LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope
