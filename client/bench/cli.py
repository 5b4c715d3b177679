"""The `trident bench` commands."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Measure a server: its stages, or with perf_analyzer and genai-perf.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _bench() -> None:
    """Keeps `stages` a command of its own whatever else there is."""


@app.command()
def stages(
    model: Annotated[str, typer.Option(help="Checkpoint folder, hub id, or demo.")] = "demo",
    random_model: Annotated[
        str | None,
        typer.Option(help="A seeded random checkpoint instead: 0.1b or 0.4b (made once)."),
    ] = None,
    streams: Annotated[str, typer.Option(help="Requests at once, in turn.")] = "1,16,64",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer, exactly.")] = 128,
    waves: Annotated[int, typer.Option(min=1, help="Per number of streams and round.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of the two.")] = 2,
    model_repository: Annotated[
        Path | None, typer.Option(help="Another model repository than Trident's own.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure tokens per second through the ensemble against the engine alone.

    Starts both in turns, never at once, with the settings of engine.json and TRIDENT_* variables,
    and gives them the same requests.
    """
    from client.bench.random_checkpoint import random_checkpoint
    from client.bench.stages import run
    from client.bench.workload import Workload

    console = Console()
    if random_model is not None:
        model = str(random_checkpoint(random_model, console))
    workload = Workload(_numbers(streams), prompt_tokens, max_tokens, waves, rounds)
    run(model, workload, console, repository=model_repository, json_file=json)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"streams: must be numbers such as 1,16,64 (got {text!r})")
    return numbers
