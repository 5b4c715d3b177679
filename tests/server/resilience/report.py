"""Printed tables of results."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{v:,.1f}" if isinstance(v, float) else str(v) for v in row))
    Console(width=160).print(table)


def verdict(problems: Sequence[str]) -> int:
    """Print the problems, if any; return the exit status of the command."""
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print("passed")
    return 1 if problems else 0
