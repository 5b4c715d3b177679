"""Measures the parts of one group in a separate process, for `kernels.bench.runner`.

Reads one request from standard input, and writes JSON lines: the ceilings, then each part as it
begins and as it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.bench import ceilings, replays
from engine.bench.checkpoint import write_checkpoint
from engine.bench.driver import EngineDriver
from engine.bench.part import Figures, Part
from engine.bench.parts import Group, groups
from engine.bench.replays import ReplaySession
from engine.bench.shapes import SHAPES, TINY, Shape
from engine.bench.transformers_peer import TransformersPeer
from engine.bench.workload import FULL, SMALL, Workload
from kernels.bench.worker import first_line, say, usable

Session = EngineDriver | TransformersPeer | ReplaySession
_SESSIONS: dict[str, type[Session]] = {
    "engine": EngineDriver,
    "transformers": TransformersPeer,
    "replays": ReplaySession,
}

_COMPILE_BYTES = 2**30  # of KV cache while only compiling
_COMPILE_S = 120.0


def plan(labels: Sequence[str], *, tiny: bool) -> list[Group]:
    """Return the groups for these models, or for the tiny one."""
    if tiny:
        return groups([TINY], SMALL)[:2]  # the third is like the second
    return groups([shape for shape in SHAPES if shape.label in labels], FULL)


def plan_replays(num_replays: int, *, tiny: bool) -> list[Group]:
    """Return the groups of replays, which can be measured at the same time."""
    return replays.groups(num_replays, SMALL if tiny else FULL, tiny=tiny)


def measure(
    group: Group,
    keys: Sequence[str],
    device: torch.device,
    deadline: float,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Measure the parts of `group` named by `keys` until the deadline; report each to `say`.

    A failing part is reported, and the next one begins.
    """
    parts = [part for part in group.parts if part.key in keys]
    with tempfile.TemporaryDirectory() as folder:
        say({"begins": parts[0].key})
        try:
            session = _session(group, Path(folder), device, deadline)
        except Exception as error:
            for part in parts:
                say({"case": part.key, "status": "failed", "reason": first_line(error)})
            return
        for part in parts:
            if time.time() > deadline:
                say({"case": part.key, "status": "left out", "reason": "no time was left"})
                continue
            if part is not parts[0]:
                say({"begins": part.key})
            say({"case": part.key, **_figures(part, session)})
            if not usable():
                sys.exit("the GPU is of no use to this process any more")


def _figures(part: Part, session: Session) -> Figures:
    """Return the figures of a part, or why there are none; never raises."""
    try:
        figures = part.measure(session)
        session.clear()
    except TimeoutError as error:
        return {"status": "left out", "reason": str(error)}
    except Exception as error:
        with suppress(Exception):  # the next part will fail and report it
            session.clear()
        return {"status": "failed", "reason": first_line(error)}
    return {"status": "measured", **figures}


def _session(group: Group, folder: Path, device: torch.device, deadline: float) -> Session:
    workload: Workload = group.parts[0].workload
    shape: Shape = group.shape
    write_checkpoint(shape, folder)
    return _SESSIONS[group.session](shape, workload, folder, device, deadline)


def compile_kernels(group: Group, device: torch.device) -> None:
    """Have the kernels of `group` in Triton's disk cache, while tests use the GPU."""
    os.nice(10)
    os.environ["TRIDENT_KV_CACHE_MEMORY_BYTES"] = str(_COMPILE_BYTES)
    # Kernels do not depend on the number of layers.
    group = replace(group, shape=replace(group.shape, layers=1))
    with tempfile.TemporaryDirectory() as folder:
        session = _session(group, Path(folder), device, time.time() + _COMPILE_S)
        if isinstance(session, ReplaySession):
            session.episode(0)


def main() -> None:
    """Serve one request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group")
    parser.add_argument("--replays", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    request = json.load(sys.stdin)
    labels = [shape.label for shape in SHAPES]
    found = plan(labels, tiny=arguments.tiny)
    found += plan_replays(arguments.replays, tiny=arguments.tiny)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    group = next(group for group in found if group.name == arguments.group)
    if request["compile_only"]:
        compile_kernels(group, device)
        return
    if request["ceilings"] and group.session == "engine":
        say({"ceilings": ceilings.measure(device)})
    measure(group, request["cases"], device, request["deadline"], say)


if __name__ == "__main__":
    main()
