"""A report as one HTML file: the tables, and the plots inside and beside it."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from client.bench.errors import BenchError

_WIDTH = 120
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
        raise BenchError("--report: needs matplotlib; pip install 'trident-llm[bench]'")
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
    from client.bench.report.plots import draw

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
