"""Tables of figures, in Markdown, and the sizes that they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table whose columns are right-aligned, but the first `left`."""
    table = Table(box=MARKDOWN)
    for column, title in enumerate(header):
        table.add_column(Text(title), justify="left" if column < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    out = StringIO()
    Console(file=out, width=1000).print(table)
    return "\n".join(line.strip() for line in out.getvalue().splitlines() if line.strip())


def sizes(text: str) -> list[int]:
    """Return positive numbers that are separated by commas."""
    found = [int(size) for size in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found
