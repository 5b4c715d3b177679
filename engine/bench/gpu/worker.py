"""`python -m engine.bench.gpu.worker GROUP [--tiny] [--compile I/N]`: measures parts of a group.

Reads a request as a line of JSON: the keys that are `done`, the `deadline` by time.time(), and the
`ceilings`, of which floors are made. Prints a line of JSON with each `key` as it begins, and with
its figures as it ends: a kernel that faults would end this process, and another one goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from engine.bench import ceilings
from engine.bench.gpu import engine, kernels
from engine.bench.gpu.engine import FULL, SMALL
from engine.bench.gpu.part import Figures, Group, Part
from kernels.bench.shapes import SHAPES, TINY

CEILINGS = "ceilings"  # the group without parts: the ceilings themselves


def groups(*, tiny: bool) -> list[Group]:
    """Return the groups of all models and of the kernels; later ones may find no time left."""
    if tiny:
        return [engine.group(TINY, SMALL), kernels.group(tiny=True)]
    engines = [engine.group(shape, FULL) for shape in SHAPES]
    return [*engines[:2], kernels.group(tiny=False), *engines[2:]]


def measure(
    group: Group, device: torch.device, request: dict[str, Any], say: Callable[[Figures], None]
) -> None:
    """Measure the parts of `group` that are not done until the deadline; report each to `say`.

    A part that raises is reported, and the next one begins.
    """
    left = [part for part in group.parts if part.key not in request["done"]]
    say({"key": left[0].key, "begins": True})
    session = group.session(device)
    for part in left:
        if time.time() > request["deadline"]:
            return
        say({"key": part.key, "begins": True})
        say({"key": part.key, **_figures(part, session, request["ceilings"])})
        if device.type == "cuda":
            torch.cuda.synchronize()  # raises after a fault: the process is of no more use


def _figures(part: Part, session: Any, limits: dict[str, float]) -> Figures:
    """Return the figures of a part, held against floor and aim, or the `reason` for none."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve one request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("group")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", metavar="I/N", help="only compile for every N-th part")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with it

    def say(figures: Figures) -> None:
        print(json.dumps(figures), file=out, flush=True)

    if options.group == CEILINGS:
        say({"key": CEILINGS, **ceilings.measure(device)})
        return
    group = next(each for each in groups(tiny=options.tiny) if each.name == options.group)
    if options.compile:
        os.nice(10)  # tests need the cores at the same time
        first, step = map(int, options.compile.split("/"))
        group.compile(device, group.parts[first::step])
    else:
        measure(group, device, json.loads(sys.stdin.readline()), say)


if __name__ == "__main__":
    main()
