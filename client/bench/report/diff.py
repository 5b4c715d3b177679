"""`trident bench diff`: two saved runs, and which differences are more than noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from client.bench.errors import BenchError


def verdict(before: Sequence[float], after: Sequence[float]) -> str:
    """Say whether the rounds of two runs differ: only if none of one is within the other's."""
    if len(before) < 2 or len(after) < 2:
        return "one round: unknown"
    if max(before) < min(after) or max(after) < min(before):
        return "differs"
    return "noise"


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a saved run, by workload and server.

    Raises:
        BenchError: it is none.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["summary"]
        return {(row["workload"], row["server"]): row["rounds"] for row in rows}
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{path} is not what --json of trident bench writes") from None


def table(before: Path, after: Path) -> Table:
    """Return the differences of what both have measured.

    Raises:
        BenchError: a file cannot be read, or they have nothing in common.
    """
    old, new = read(before), read(after)
    both = [key for key in old if key in new]
    if not both:
        raise BenchError(f"{before} and {after} have no workload of one server in common")
    shown = Table(
        title=f"{before.name} to {after.name}",
        caption="medians; noise: the rounds of the two runs overlap",
        box=box.SIMPLE,
    )
    for name in ("", "before", "after", "ratio", ""):
        shown.add_column(name, justify="right" if name else "left")
    for key in both:
        shown.add_section()
        shown.add_row(", ".join(key))
        for metric, values in old[key].items():
            now = new[key].get(metric)
            if not now:
                continue
            was, is_now = median(values), median(now)
            ratio = f"{is_now / was:.2f}" if was else "-"
            shown.add_row(f"  {metric}", f"{was:.4g}", f"{is_now:.4g}", ratio, verdict(values, now))
    return shown
