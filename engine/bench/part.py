"""Part: one measurement, its floor and its target."""

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
    """A row of the table.

    Attributes:
        session: what it runs on, `engine` or `transformers`.
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

    @property
    def aim(self) -> Aim | None:
        """Its target, if any: a share of its floor, or a time."""
        return None

    @abstractmethod
    def floor(self, figures: Figures, ceilings: Ceilings) -> float:
        """Return the minimum seconds for the work in `figures`, given the ceilings."""

    @abstractmethod
    def measure(self, session: Any) -> Figures:
        """Return `seconds`, output `tokens_per_second` where meaningful, and further figures.

        Args:
            session: the `EngineDriver` or `TransformersPeer` of the shape.
        """
