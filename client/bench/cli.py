"""The `trident bench` commands."""

import inspect
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from client.bench.options import Options
from engine.console import Console

app = typer.Typer(
    help="Load-test servers side by side, and measure what each stage costs.",
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


def _parameter(option: Field[Any]) -> inspect.Parameter:
    more = dict(option.metadata)
    kind = Annotated[option.type, typer.Option(*more.pop("param_decls"), **more)]  # type: ignore[name-defined]
    default = option.default
    return inspect.Parameter(option.name, _KEYWORD, default=default, annotation=kind)


# What typer reads: each field of `Options` is an option.
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_CONTEXT = list(inspect.signature(load).parameters.values())[:1]
load.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_CONTEXT, *map(_parameter, fields(Options))]
)
app.callback(invoke_without_command=True)(load)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="Results file that --json wrote.")],
    after: Annotated[Path, typer.Argument(help="Results file of the run to compare with it.")],
) -> None:
    """Compare two saved runs, and say which differences are more than noise."""
    from client.bench.report.tables import differences

    Console().print(differences(before, after))
