"""What the process of a group does: it measures its parts."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import torch

from engine.bench.gpu import engine, kernels
from engine.bench.gpu.engine import FULL, SMALL
from engine.bench.gpu.part import Figures, Group, Part
from engine.bench.kernels.shapes import SHAPES, TINY


def groups(*, tiny: bool) -> list[Group]:
    """Return the groups of all models and of the kernels; later ones may find no time left."""
    if tiny:
        return [engine.group(TINY, SMALL), kernels.group(tiny=True)]
    engines = [engine.group(shape, FULL) for shape in SHAPES]
    return [*engines[:2], kernels.group(tiny=False), *engines[2:]]


def device() -> torch.device:
    """Return what is measured."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(name: str, tiny: bool, key: str, limits: dict[str, float]) -> Figures:
    """Return the figures of a part, held against floor and aim, or the `reason` for none."""
    group, session = _session(name, tiny)
    (part,) = (each for each in group.parts if each.key == key)
    figures = _figures(part, session, limits)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # raises after a fault: the process is of no more use
    return figures


@cache
def _session(name: str, tiny: bool) -> tuple[Group, Any]:
    group = next(each for each in groups(tiny=tiny) if each.name == name)
    return group, group.session(device())


def _figures(part: Part, session: Any, limits: dict[str, float]) -> Figures:
    try:
        figures = part.measure(session)
        session.clear()
    except Exception as error:
        with suppress(Exception):  # the next part will fail and report it
            session.clear()
        line = next(iter(str(error).strip().splitlines()), "")
        return {"reason": f"{type(error).__name__}: {line[:300]}"}
    floor = part.floor(figures, limits) if limits else None
    judged: Figures = {"floor": floor}
    if part.aim is not None:
        share = floor / figures["seconds"] if floor else None
        judged |= {"aim": str(part.aim), "met": part.aim.met(figures["seconds"], share)}
    return {**figures, **judged}
