"""A report as one HTML file: the tables, and the plots inside it and beside it, as PNG files."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from client.bench.errors import BenchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 120
_DPI = 90
# What rich fills in, without colours: a page of its own.
_PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Load test</title><style>"
    "{stylesheet} body{{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;"
    "padding:0 1em}} pre{{overflow-x:auto}} img{{max-width:100%}}</style>"
    "<h1>Load test</h1><pre>{code}</pre>"
)


def prepare(folder: Path) -> None:
    """Create the folder of a report, before anything is measured.

    Raises:
        BenchError: it cannot be written, or there is nothing to plot with.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--report: needs matplotlib; run pip install 'trident-llm[bench]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").touch()
    except OSError as error:
        raise BenchError(f"--report: cannot write {folder}: {error.strerror}") from None


def write_report(found: dict[str, Any], shown: Sequence[RenderableType], folder: Path) -> None:
    """Write `index.html`, `results.json` and the plots of `found`, as of `as_json`.

    Args:
        shown: the tables and notes.
    """
    (folder / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    console = Console(file=io.StringIO(), record=True, width=_WIDTH)
    for each in shown:
        console.print(each, highlight=False, markup=False)
    page = console.export_html(theme=DEFAULT_TERMINAL_THEME, code_format=_PAGE)
    images = "".join(_image(path) for path in draw(found, folder))
    (folder / "index.html").write_text(page + images, encoding="utf-8")


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{path.stem}" src="data:image/png;base64,{data}">'


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write the plots of `found`, as of `as_json`, to `folder`; return their files."""
    files = []
    for name, figure in _figures(found):
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], format="png", dpi=_DPI)
    return files


def _figures(found: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    rows = found["summary"]
    if rows:
        yield "throughput", _bars(rows)
    if len({row["workload"] for row in rows}) > 1:
        yield "load", _load(rows)
    runs = [
        (f"{run['workload']}, {run['server']}", run["measurement"])
        for run in found["runs"]
        if run["round"] == 0
    ]
    if any(len(run["requests"]) > 1 for _, run in runs):
        yield "users", _users(runs)
    if any(run["metrics"]["samples"] for _, run in runs):
        yield "kv", _kv(runs)


def _axes(title: str, x: str, y: str, height: float = 4.5) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _bars(rows: list[dict[str, Any]]) -> Figure:
    """Throughput of each server on each workload: of one workload, the ladder."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    title, x = "Output tokens per second", "median, lowest and highest round"
    figure, axes = _axes(title, x, "", height=1.5 + 0.45 * len(rows))
    labels = []
    for y, row in enumerate(reversed(rows)):
        speed = row["speed"]
        spread = [[speed["median"] - speed["min"]], [speed["max"] - speed["median"]]]
        axes.barh(y, speed["median"], xerr=spread, color=_colour(rows, row["server"]))
        axes.text(speed["median"], y, f"  {speed['median']:.0f}", va="bottom", fontsize=8)
        labels.append(row["server"] if len(names) == 1 else f"{row['workload']}, {row['server']}")
    axes.set_yticks(range(len(rows)), labels)
    axes.margins(x=0.1)  # for the numbers at the bars' ends
    return figure


def _colour(rows: list[dict[str, Any]], server: str) -> str:
    servers = list(dict.fromkeys(row["server"] for row in rows))
    return f"C{servers.index(server) % 10}"


def _load(rows: list[dict[str, Any]]) -> Figure:
    """Throughput against latency, a point per workload: as load rises, both do."""
    figure, axes = _axes("As load rises", "output tokens per second", "s per answer, p50 and p99")
    for server in dict.fromkeys(row["server"] for row in rows):
        own = [row for row in rows if row["server"] == server]
        colour = _colour(rows, server)
        speeds = [row["speed"]["median"] for row in own]
        axes.plot(speeds, [row["latency"][0] for row in own], "o-", color=colour, label=server)
        axes.plot(speeds, [row["latency"][2] for row in own], "o:", color=colour)
        for row, speed in zip(own, speeds, strict=True):
            axes.annotate(row["workload"], (speed, row["latency"][0]), fontsize=7)
    axes.set_yscale("log")
    axes.legend()
    return figure


def _users(runs: list[tuple[str, dict[str, Any]]]) -> Figure:
    """The speed that each user sees, against the time at which the user came."""
    title = "Tokens per second of each user, by when the user came"
    figure, axes = _axes(title, "seconds since the first user", "tokens per second")
    for name, run in runs:
        intended = [request["intended"] for request in run["requests"]]
        speeds = [
            sum(count for _, count in request["arrivals"])
            / (request["arrivals"][-1][0] - request["intended"])
            for request in run["requests"]
        ]
        came = [at - min(intended) for at in intended]
        axes.plot(came, speeds, ".", label=name)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    return figure


def _kv(runs: list[tuple[str, dict[str, Any]]]) -> Figure:
    """The share of the KV cache in use, over time."""
    figure, axes = _axes("KV cache in use", "seconds", "% of the blocks")
    for name, run in runs:
        samples = run["metrics"]["samples"]
        if samples:
            at = [each[0] for each in samples]
            axes.plot(at, [100 * each[3] for each in samples], label=name)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    return figure
