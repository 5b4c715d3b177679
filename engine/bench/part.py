"""Part: what is measured at once; TimedPart: with its floor and its target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.bench.floors import Ceilings
from engine.bench.shapes import Shape
from engine.bench.workload import Workload
from kernels.bench.case import Aim

Figures = dict[str, Any]


@dataclass(frozen=True)
class Part(ABC):
    """Work that one process does at a time.

    Attributes:
        session: what it runs on: `engine`, `transformers` or `replays`.
    """

    shape: Shape
    workload: Workload
    session: ClassVar[str] = "engine"

    @property
    @abstractmethod
    def name(self) -> str:
        """Distinguishes it from the other parts of the model."""

    @property
    def key(self) -> str:
        """Distinguishes it from all other parts."""
        return f"{self.shape.label} {self.name}"

    @abstractmethod
    def measure(self, session: Any) -> Figures:
        """Do the work, and return its figures.

        Args:
            session: the `EngineDriver`, `TransformersPeer` or `ReplaySession` of the shape.
        """


@dataclass(frozen=True)
class TimedPart(Part):
    """A row of the table.

    Its figures have `seconds`, and output `tokens_per_second` where meaningful.
    """

    @property
    def aim(self) -> Aim | None:
        """Its target, if any: a share of its floor, or a time."""
        return None

    @abstractmethod
    def floor(self, figures: Figures, ceilings: Ceilings) -> float:
        """Return the minimum seconds for the work in `figures`, given the ceilings."""
