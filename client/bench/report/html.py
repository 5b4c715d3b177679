"""A report as one HTML file, with its plots inside and beside it."""

from __future__ import annotations

import base64
import importlib.util
import json
from html import escape
from pathlib import Path
from typing import Any

from client.bench.errors import BenchError

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,td:nth-child(2){text-align:left}img{max-width:100%}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}img{background:#fff}}"
)
_COLUMNS = (
    *("workload", "server", "tok/s", "min-max", "TTFT p50/p90/p99, ms", "inter-token, ms"),
    *("latency, s", "user tok/s p50", "goodput, requests/s", "failed", "memory, GB", "others, %"),
)


def prepare(folder: Path) -> None:
    """Create the folder of a report, before anything is measured.

    Raises:
        BenchError: it cannot be written, or there is nothing to plot with.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--report: needs matplotlib; pip install 'trident-llm[bench]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").touch()
    except OSError as error:
        raise BenchError(f"--report: cannot write {folder}: {error.strerror}") from None


def write_report(found: dict[str, Any], folder: Path) -> None:
    """Write `index.html`, `results.json` and the plots of `found`, as of `as_json`."""
    from client.bench.report.plots import draw

    (folder / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    images = "".join(_image(path) for path in draw(found, folder))
    texts = "".join(
        f"<li><b>{escape(each['name'])}</b>: {escape(each['text'])}" for each in found["workloads"]
    )
    failures = "".join(
        f"<li>{escape(name)} has not all its figures: {escape(text)}"
        for name, text in found["failures"].items()
    )
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>Load test</title><style>{_STYLE}</style><h1>Load test</h1>"
        f"<p>{found['cores']} cores; others is the share of them that other programs used."
        f"<ul>{texts}{failures}</ul>{_table(found['summary'])}{images}</html>"
    )
    (folder / "index.html").write_text(page, encoding="utf-8")


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{path.stem}" src="data:image/png;base64,{data}">'


def _table(rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}" for name in _COLUMNS)
    return f"<table><tr>{head}{''.join(_row(row) for row in rows)}</table>"


def _row(row: dict[str, Any]) -> str:
    def times(values: list[float], scale: float, digits: int) -> str:
        return " / ".join(f"{scale * value:.{digits}f}" for value in values)

    speed = row["speed"]
    cells = (
        escape(row["workload"]),
        escape(row["server"]),
        f"{speed['median']:.1f}",
        f"{speed['min']:.1f}-{speed['max']:.1f}",
        times(row["ttft"], 1000, 0),
        times(row["gap"], 1000, 1),
        times(row["latency"], 1, 2),
        f"{row['user_speed'][0]:.1f}",
        f"{row['goodput']:.2f}",
        str(row["failed"]),
        f"{row['memory'] / 1e9:.2f}",
        f"{100 * row['others']:.1f}{'*' if row['is_disturbed'] else ''}",
    )
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells)
