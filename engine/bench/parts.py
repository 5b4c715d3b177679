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
    """Parts that one process measures in turn, in one session.

    Attributes:
        title: distinguishes it from the model's other groups.
        session: `engine` or `transformers`.
    """

    shape: Shape
    title: str
    session: str
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """Distinguishes it from all other groups."""
        return f"{self.shape.label} {self.title}"


def groups(shapes: Sequence[Shape], workload: Workload) -> list[Group]:
    """Return all groups, the most important first: later ones may find no time left."""
    return [make(shape, workload) for make in (_engine, _few, _all) for shape in shapes]


def _engine(shape: Shape, workload: Workload) -> Group:
    parts: tuple[Part, ...] = (
        *(Decode(shape, workload, batch) for batch in workload.batches),
        Prefill(shape, workload, 1),
        Prefill(shape, workload, _PROMPTS),
        FirstToken(shape, workload),
        Offline(shape, workload, workload.sequences, _TEMPERATURE),
        Offline(shape, workload, workload.shared, 0.0),
    )
    return Group(shape, "engine", "engine", parts)


def _few(shape: Shape, workload: Workload) -> Group:
    parts = (
        ContinuousBatching(shape, workload, workload.shared, 0.0),
        StaticBatching(shape, workload, workload.shared, 0.0),
    )
    return Group(shape, "transformers", "transformers", parts)


def _all(shape: Shape, workload: Workload) -> Group:
    parts = (ContinuousBatching(shape, workload, workload.sequences, 0.0),)
    return Group(shape, "transformers, all sequences", "transformers", parts)
