"""Whether a series of measurements grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Trend:
    """A straight line through what was measured after the warm-up, by least squares.

    Attributes:
        start, middle, end: the median of the first, middle and last tenth of the measurements.
        growth: the rise of the line over the time measured.
        per_hour: its slope.
        allowed: the growth up to which the series counts as flat.
    """

    start: float
    middle: float
    end: float
    growth: float
    per_hour: float
    allowed: float

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.allowed

    @classmethod
    def of(cls, seconds: Sequence[float], values: Sequence[float], allowed: float) -> Trend:
        """Fit a line; there must be two measurements at least, at different times."""
        count = len(seconds)
        mean_time, mean = sum(seconds) / count, sum(values) / count
        pairs = list(zip(seconds, values, strict=True))
        covariance = sum((s - mean_time) * (v - mean) for s, v in pairs)
        slope = covariance / sum((s - mean_time) ** 2 for s in seconds)
        tenth = max(1, count // 10)
        centre = count // 2
        return cls(
            start=_median(values[:tenth]),
            middle=_median(values[centre : centre + tenth]),
            end=_median(values[-tenth:]),
            growth=slope * (seconds[-1] - seconds[0]),
            per_hour=slope * 3600,
            allowed=allowed,
        )


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def allowed_growth(measure: str, start: float) -> float:
    """Return how much `measure` may grow after the warm-up without counting as a leak.

    Memory: 2 % of what it is, at least 4 MiB, for allocators take and give in steps. Shared
    memory: one step of a region. Descriptors and threads: 5 %, at least two, for those that serve
    the connections of the moment.
    """
    if measure in ("rss", "pss"):
        return max(0.02 * start, 4 * MIB)
    return MIB if measure == "shared memory" else max(0.05 * start, 2)
