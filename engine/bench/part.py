"""Part: one thing that is measured, the floor that it is held against and what it is to reach."""

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
        """What sets it apart from the other parts of the model."""

    @property
    def key(self) -> str:
        """What sets it apart from all other parts."""
        return f"{self.shape.label} {self.name}"

    @property
    def aim(self) -> Aim | None:
        """What it is to reach, if anything: a share of its floor, or a time."""
        return None

    @abstractmethod
    def floor(self, figures: Figures, ceilings: Ceilings) -> float:
        """Return the least seconds that the ceilings allow for what `figures` are of."""

    @abstractmethod
    def measure(self, session: Any) -> Figures:
        """Return `seconds`, `tokens_per_second` of output where it means something, and more.

        Args:
            session: the `EngineDriver` or `TransformersPeer` of the shape.
        """
