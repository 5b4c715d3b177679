"""What `LLM` shows on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.console import Console


@contextmanager
def loading(model: str) -> Iterator[Callable[[str], None]]:
    """Show loading progress on stderr, if a terminal; yields the function that reports it."""
    with Console(stderr=True).status(f"loading {escape(model)}", spinner="line") as status:
        yield lambda text: status.update(escape(text))


@contextmanager
def progress(total: int, *, enabled: bool) -> Iterator[Any]:
    """Show a bar on stderr; yields the function that advances it by one sequence."""
    with Progress(
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not enabled,
    ) as progress:
        task = progress.add_task("generating", total=total)
        yield lambda: progress.advance(task)
