"""The `trident` command."""

import io
import os
import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console

from client.commands.lazy import LazyGroup
from client.errors import ConnectError, TridentClientError

# name -> (module, what the list of commands says of it)
COMMANDS = {
    "serve": ("client.commands.serve", "Serve a model inside tritonserver until Ctrl-C."),
    "gateway": (
        "client.commands.gateway",
        "Serve OpenAI's API in front of Triton servers until Ctrl-C.",
    ),
    "demo": (
        "client.commands.demo",
        "Start the server on the bundled model and ask it several questions at once.",
    ),
    "run": ("client.commands.run", "Print the model's answer to a prompt as it is generated."),
    "chat": (
        "client.commands.chat",
        "Chat with the model: Ctrl-C stops an answer, Ctrl-D ends the chat.",
    ),
    "health": (
        "client.commands.health",
        "Check the health of the server; exit status 1 if it is not healthy.",
    ),
    "bench": (
        "client.bench.cli",
        "Load-test servers side by side, and measure what each stage costs.",
    ),
}


class _Commands(LazyGroup):
    modules = COMMANDS


# What is wrong with a command line; typer does not export it.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    cls=_Commands,
    name="trident",
    help="Serve language models inside NVIDIA Triton Inference Server.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"trident {_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def _version() -> str:
    try:
        return metadata.version("trident-llm")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main() -> None:
    """Run the command; an expected error becomes one line on stderr.

    The exit status is 1 after such an error, 2 if the command line is wrong, 130 after Ctrl-C.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC logs each lost peer to the terminal
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a terminal that cannot show all that models write
    try:
        status = app(prog_name="trident", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, _USAGE_ERROR):
            where = error.ctx.command_path if error.ctx is not None else "trident"
            _complain(f"trident: {error.format_message()} ({where} --help says more)", style="red")
            raise SystemExit(2) from None
        if not isinstance(error, _expected_errors()):
            raise
        is_away = isinstance(error, ConnectError)
        todo = " (trident serve starts a server; --url gives the address of one)" if is_away else ""
        _complain(f"trident: {error}{todo}", style="red")
        if hint := getattr(error, "hint", ""):
            _complain(f"  {hint}")
        raise SystemExit(1) from None
    raise SystemExit(status)


def _expected_errors() -> tuple[type[Exception], ...]:
    """Return the errors whose text is for the user; the engine's only if a command loaded it."""
    engine = sys.modules.get("engine.errors")
    return (TridentClientError, *([engine.TridentError] if engine is not None else []))


def _complain(text: str, style: str | None = None) -> None:
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
