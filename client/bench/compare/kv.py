"""How full the blocks of a KV cache are, from what a server says and what its clients got."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from client.bench.compare.measurement import Measurement, held_tokens


class KvFigures(NamedTuple):
    """Medians over the moments at which the KV cache was in use.

    Attributes:
        waste: share of the slots in use that hold no token, unless prompts share blocks.
        saved: share of the slots that sequences without shared blocks would need and these do not.
    """

    waste: float
    saved: float


def kv_figures(one: Measurement) -> KvFigures | None:
    """Return the figures of a run; None if the server tells too little."""
    shares = []
    for sample in one.metrics.samples:
        slots = sample.kv_usage * one.metrics.kv_slots
        held = held_tokens(one.requests, sample.at)
        if slots > 0 and held > 0:
            shares.append(held / slots)
    if not shares:
        return None
    share = median(shares)
    return KvFigures(waste=max(0.0, 1 - share), saved=max(0.0, 1 - 1 / share))
