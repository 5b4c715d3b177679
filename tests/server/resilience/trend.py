"""Whether a series of measurements grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

MIB = 2**20


@dataclass(frozen=True)
class Trend:
    """A straight line through the measurements after the warm-up.

    By the Theil-Sen estimator, the median of the slopes between all pairs, which is robust against
    short peaks (Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968).

    Attributes:
        start, middle, end: the median of the first, middle and last tenth of the measurements.
        growth: the rise of the line over the measured time.
        per_hour: its slope.
        allowed: the maximum growth of a flat series.
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
        """Fit a line to at least two measurements, in order of time."""
        count = len(seconds)
        points = list(zip(seconds, values, strict=True))
        pairs = combinations(points, 2)
        slope = median([(v - u) / (t - s) for (s, u), (t, v) in pairs])
        tenth = max(1, count // 10)
        centre = count // 2
        return cls(
            start=median(values[:tenth]),
            middle=median(values[centre : centre + tenth]),
            end=median(values[-tenth:]),
            growth=slope * (seconds[-1] - seconds[0]),
            per_hour=slope * 3600,
            allowed=allowed,
        )


def allowed_growth(measure: str, start: float) -> float:
    """Return how much `measure` may grow after the warm-up without counting as a leak.

    PSS is not judged: a library's share grows when another program that maps it, such as a second
    server, ends. Other memory: 2 %, at least 4 MiB, since allocators work in steps. Shared memory:
    one step of a region. Descriptors and threads: 5 %, at least two, for current connections.
    """
    if measure == "pss":
        return math.inf
    if measure in ("rss", "uss"):
        return max(0.02 * start, 4 * MIB)
    return MIB if measure == "shared memory" else max(0.05 * start, 2)
