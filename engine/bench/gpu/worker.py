"""Measures the parts of a group in a process of its own, for `Supervisor`.

`python -m engine.bench.gpu.worker GROUP [--tiny] [--compile]`
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from engine.bench.gpu.part import Figures, Group, Part
from engine.bench.gpu.plan import groups
from engine.bench.gpu.supervisor import left_out, say, usable


def measure(
    group: Group,
    keys: Sequence[str],
    device: torch.device,
    deadline: float,
    say: Callable[[dict[str, Any]], None] = say,
) -> None:
    """Measure the parts of `group` named by `keys` until the deadline; report each to `say`.

    A failing part is reported, and the next one begins.
    """
    say({"begins": keys[0]})
    try:
        session = group.session(device, deadline)
    except Exception as error:
        for key in keys:
            say({"ends": key, **failure(error)})
        return
    for part in [part for part in group.parts if part.key in keys]:
        if time.time() > deadline:
            say({"ends": part.key, **left_out()})
            continue
        say({"begins": part.key})
        say({"ends": part.key, **_figures(part, session)})
        if not usable():
            sys.exit("the GPU is of no use to this process any more")


def _figures(part: Part, session: Any) -> Figures:
    """Return the figures of a part, or why there are none; never raises."""
    try:
        figures = part.measure(session)
        session.clear()
    except Exception as error:
        with suppress(Exception):  # the next part will fail and report it
            session.clear()
        return left_out(str(error)) if isinstance(error, TimeoutError) else failure(error)
    return {"status": "measured", **figures}


def failure(error: Exception) -> Figures:
    """Return the figures of a part that raised `error`: its type and first line."""
    line = next(iter(str(error).strip().splitlines()), "")
    return {"status": "failed", "reason": f"{type(error).__name__}: {line[:300]}"}


def main(name: str, *options: str) -> None:
    """Serve one request."""
    group = next(each for each in groups(tiny="--tiny" in options) if each.name == name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    request = json.load(sys.stdin)
    if "--compile" in options:
        os.nice(10)  # tests need the cores at the same time
        assert group.compile is not None
        group.compile(device, request["keys"])
    else:
        measure(group, request["keys"], device, request["deadline"])


if __name__ == "__main__":
    main(*sys.argv[1:])
