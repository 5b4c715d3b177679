"""The plot of throughput and TTFT against the number of streams and the context length."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from client.bench.compare.report import Results, Row
from client.bench.compare.workload import Growth, Workload
from client.bench.errors import BenchError
from client.bench.files import require_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (11, 8)


class GrowthPlot:
    """A PNG file with tokens per second and times to first token.

    Raises:
        BenchError: it cannot be drawn or written; raised before measuring.
    """

    def __init__(self, path: Path, growth: Growth) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise BenchError("--growth: needs matplotlib; pip install 'trident[bench]'")
        require_writable("--growth", path)
        self._path = path
        self._growth = growth

    def draw(self, results: Results) -> None:
        """Write the file, one line per server with a point per workload measured on it."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.subplots(2, 2)
        cuts: tuple[tuple[Sequence[Workload], Callable[[Workload], int], str], ...] = (
            (self._growth.streams, lambda each: each.streams, "streams"),
            (self._growth.context, lambda each: each.prompt_tokens, "tokens of the prompt"),
        )
        for column, (workloads, place, label) in enumerate(cuts):
            speed, ttft = axes[0][column], axes[1][column]
            places = {each.name: place(each) for each in workloads}
            speed.set_title(_constants(workloads, label))
            _lines(speed, results, places, lambda row: row.speed.median)
            _lines(ttft, results, places, lambda row: row.ttft[0])
            floors = [results.floors[name].bf16 for name in places]
            speed.plot(list(places.values()), floors, "k--", label="floor, bf16")
            speed.set_ylabel("output tokens per second")
            ttft.set_ylabel("s to the first token, p50")
            for each in (speed, ttft):
                each.set_xlabel(label)
                each.set_xscale("log", base=2)
                each.set_yscale("log")
                each.set_xticks(list(places.values()), [str(at) for at in places.values()])
                each.grid(alpha=0.3)
                each.legend()
        figure.savefig(self._path, format="png", dpi=120)


def _lines(
    axes: Axes, results: Results, places: dict[str, int], value: Callable[[Row], float]
) -> None:
    """Draw a line for each server."""
    rows = [row for row in results.rows() if row.workload in places]
    for server in results.sessions:
        own = [row for row in rows if row.server == server]
        if own:
            at = [places[row.workload] for row in own]
            axes.plot(at, [value(row) for row in own], "o-", label=server)


def _constants(workloads: Sequence[Workload], label: str) -> str:
    one = workloads[0]
    fixed = f"{one.prompt_tokens} tokens in" if label == "streams" else f"{one.streams} streams"
    return f"{fixed}, {one.output_tokens} out"
