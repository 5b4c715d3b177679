"""Part: what is measured at once; Group: the parts that one process measures in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.bench.floors import Ceilings
from kernels.bench.case import Aim

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Work with figures: their `seconds`, and output `tokens_per_second` where meaningful.

    Attributes:
        key: distinguishes it from all other parts.
        measure: does the work in a session of its group, and returns the figures.
        floor: the minimum seconds for the work in the figures, given the ceilings.
        aim: its target.
        beside: the key of another part that does the same in transformers.
    """

    key: str
    measure: Callable[[Any], Figures]
    floor: Callable[[Figures, Ceilings], float] | None = None
    aim: Aim | None = None
    beside: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Parts that share a process and a session, which has the model.

    Attributes:
        kind: its name in `--only`.
        session: from a device and a deadline, by time.time(); its `clear` follows each part.
        compile: leaves the kernels of the parts with these keys in Triton's cache.
        refused_by: whether a failed test, by its id, makes the figures of a key meaningless.
    """

    name: str
    kind: str
    parts: tuple[Part, ...]
    session: Callable[[torch.device, float], Any]
    compile: Callable[[torch.device, list[str]], None] | None = None
    refused_by: Callable[[str, str], bool] = lambda key, test: False

    @property
    def keys(self) -> list[str]:
        """The keys of its parts."""
        return [part.key for part in self.parts]
