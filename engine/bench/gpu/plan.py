"""All groups of a run, in their order: later ones may find no time left."""

from __future__ import annotations

import torch

from engine.bench import ceilings
from engine.bench.gpu import engine, kernels, transformers_peer
from engine.bench.gpu.part import Figures, Group, Part
from engine.bench.gpu.replays import session as replays
from engine.bench.gpu.workload import FULL, SMALL
from kernels.bench.shapes import SHAPES, TINY


class _Ceilings:
    """The session of a part that needs no model."""

    def __init__(self, device: torch.device, deadline: float) -> None:
        self.device = device

    def measure(self) -> Figures:
        return dict(ceilings.measure(self.device))

    def clear(self) -> None:
        """Do nothing."""


def groups(*, tiny: bool) -> list[Group]:
    """Return the groups: of the models in turn, or of the tiny one."""
    shapes, workload = ([TINY], SMALL) if tiny else (SHAPES, FULL)
    engines = [engine.group(shape, workload) for shape in shapes]
    peers = [transformers_peer.group(shape, workload) for shape in shapes]
    limits = Part("ceilings", _Ceilings.measure)
    return [
        *replays.groups(tiny=tiny)[: 1 if tiny else None],
        Group("ceilings", "ceilings", (limits,), _Ceilings),
        *engines[:2],
        kernels.group(tiny=tiny),
        *peers[:2],
        *engines[2:],
        *peers[2:],
    ]
