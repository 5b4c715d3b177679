"""All parts of a run, in groups that share a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.bench.decode import Decode
from engine.bench.offline import Offline
from engine.bench.part import Part
from engine.bench.prefill import FirstToken, Prefill
from engine.bench.shapes import Shape
from engine.bench.transformers_peer import ContinuousBatching, StaticBatching
from engine.bench.workload import Workload

_TEMPERATURE = 0.6
_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class Group:
    """Parts that one process measures, one after the other, on one session."""

    shape: Shape
    session: str
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        return f"{self.shape.label} {self.session}"


def groups(shapes: Sequence[Shape], workload: Workload) -> list[Group]:
    """Return all groups, the most telling first: later ones may find no time left."""
    engine = [_engine(shape, workload) for shape in shapes]
    peers = [_transformers(shape, workload) for shape in shapes]
    # Two models say most; the engine is measured on them before transformers is on either.
    return [*engine[:2], *peers[:2], *engine[2:], *peers[2:]]


def _engine(shape: Shape, workload: Workload) -> Group:
    parts: tuple[Part, ...] = (
        *(Decode(shape, workload, batch) for batch in workload.batches),
        Prefill(shape, workload, 1),
        Prefill(shape, workload, _PROMPTS),
        FirstToken(shape, workload),
        Offline(shape, workload, workload.sequences, _TEMPERATURE),
        Offline(shape, workload, workload.shared, 0.0),
    )
    return Group(shape, "engine", parts)


def _transformers(shape: Shape, workload: Workload) -> Group:
    parts = (
        ContinuousBatching(shape, workload, workload.shared, 0.0),
        StaticBatching(shape, workload, workload.shared, 0.0),
        ContinuousBatching(shape, workload, workload.sequences, 0.0),
    )
    return Group(shape, "transformers", parts)
