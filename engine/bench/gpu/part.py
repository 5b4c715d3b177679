"""Part: what is measured at once; Group: the parts that one process measures in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.bench.floors import Ceilings
from engine.bench.kernels.case import Aim

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Work with figures, of which `seconds` is one.

    Attributes:
        key: distinguishes it from all other parts.
        measure: does the work in a session of its group, and returns the figures.
        floor: the minimum seconds for the work in the figures, given the ceilings.
        aim: its target.
    """

    key: str
    measure: Callable[[Any], Figures]
    floor: Callable[[Figures, Ceilings], float]
    aim: Aim | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Parts that share a process and a session, which has the model.

    Attributes:
        kind: its name in `--only`.
        session: from a device; its `clear` follows each part.
    """

    name: str
    kind: str
    parts: Sequence[Part]
    session: Callable[[torch.device], Any]
