"""The `trident bench` commands."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from client.bench.options import Options

app = typer.Typer(
    help="Measure servers under load, beside each other, and what the stages cost.",
    rich_markup_mode=None,
)


def load(context: typer.Context, **given: Any) -> None:
    """Measure servers under load, one at a time on the same cores.

    Without --url Trident is started on a seeded random checkpoint, with the settings of engine.json
    and TRIDENT_* variables, and all peers beside it on the same one.
    """
    if context.invoked_subcommand is not None:
        return
    from client.bench.command import list_workloads, run

    sources = (context.get_parameter_source(each) for each in context.params)
    if all(each is not None and each.name == "DEFAULT" for each in sources):
        typer.echo(f"{context.get_help()}\n\n{list_workloads()}")
    elif not run(Options(**given), Console()):
        raise typer.Exit(1)


# What typer reads: each field of `Options` is an option.
_CONTEXT = list(inspect.signature(load).parameters.values())[:1]
_FIELDS = inspect.signature(Options).parameters.values()
load.__signature__ = inspect.Signature([*_CONTEXT, *_FIELDS])  # type: ignore[attr-defined]
app.callback(invoke_without_command=True)(load)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="What --json wrote.")],
    after: Annotated[Path, typer.Argument(help="What it wrote of another run.")],
) -> None:
    """Compare two saved runs, and say which differences are more than noise."""
    from client.bench.report.diff import table

    Console().print(table(before, after))
