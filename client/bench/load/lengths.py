"""Lengths: a distribution of numbers of tokens."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from client.bench.errors import BenchError

_FORMS = "must be N, LOW-HIGH (uniform) or lognormal:MEDIAN:SIGMA, in tokens"


@dataclass(frozen=True)
class Lengths:
    """Uniform between `low` and `high`, or with a `sigma` log-normal around `low`; at least 1."""

    low: int
    high: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, flag: str, text: str) -> Lengths:
        """Read `128`, `16-512` or `lognormal:256:0.8`.

        Raises:
            BenchError: it is none of these; names `flag`.
        """
        try:
            if text.startswith("lognormal:"):
                _, median, sigma = text.split(":")
                found = cls(int(median), int(median), float(sigma))
            else:
                low, _, high = text.partition("-")
                found = cls(int(low), int(high or low))
        except ValueError:
            raise BenchError(f"{flag}: {_FORMS} (got {text!r})") from None
        if not (1 <= found.low <= found.high and 0 <= found.sigma < math.inf):
            raise BenchError(f"{flag}: {_FORMS} (got {text!r})")
        return found

    @classmethod
    def exactly(cls, count: int) -> Lengths:
        """Always `count`."""
        return cls(count, count)

    @property
    def is_constant(self) -> bool:
        """Whether all are the same."""
        return self.low == self.high and self.sigma == 0

    def draw(self, generator: random.Random) -> int:
        """Return one of them."""
        if self.sigma:
            return max(1, round(self.low * math.exp(generator.gauss(0, self.sigma))))
        return generator.randint(self.low, self.high)

    def __str__(self) -> str:
        if self.sigma:
            return f"lognormal:{self.low}:{self.sigma:g}"
        return str(self.low) if self.is_constant else f"{self.low}-{self.high}"


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """Read positive numbers separated by commas; there may be none.

    Raises:
        BenchError: it is something else; names `flag`.
    """
    if not text:
        return ()
    if not re.fullmatch(r"[\d.]+(,[\d.]+)*", text):
        raise BenchError(f"{flag}: must be numbers such as 1,16,64 (got {text!r})")
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = (0.0,)
    if min(found) <= 0:
        raise BenchError(f"{flag}: must be numbers above 0 (got {text!r})")
    return found
