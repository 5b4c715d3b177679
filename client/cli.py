"""The `trident` command."""

import inspect
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from client.arguments import setting_flags
from client.errors import ServerStartError, TridentClientError
from engine.config import EngineConfig

app = typer.Typer(
    name="trident",
    help="Serve language models inside NVIDIA Triton Inference Server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Option("--url", help="gRPC address of the server, host:port.")]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"trident {_version()}")
        raise typer.Exit


def _serve(
    context: typer.Context,
    model_repository: Annotated[
        Path | None, typer.Option(help="Another model repository than Trident's own.")
    ] = None,
    **settings: Any,
) -> None:
    """Start tritonserver on Trident's model repository and keep it up until Ctrl-C.

    Flags that are not listed here go to tritonserver as they are: --http-port, --grpc-port,
    --metrics-port (0 chooses a free one), --log-verbose ...
    """
    from client.serve_command import serve

    raise typer.Exit(serve(settings, context.args, model_repository, Console()))


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**settings` one option per field of EngineConfig.

    Values are taken as strings: EngineConfig itself converts and checks them, so that a flag, a
    variable and `engine.json` obey the same rules. A boolean is `--field` or `--no-field`.
    """
    signature = inspect.signature(command)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, field in EngineConfig.model_fields.items():
        default = "" if field.default is None else f" [default: {field.default}]"
        text = f"{field.description}{default}"
        annotation: Any
        if field.annotation is bool:
            flag = setting_flags()[name][0]
            option = typer.Option(f"{flag}/--no-{flag[2:]}", help=text)
            annotation = Annotated[bool | None, option]
        else:
            option = typer.Option(*setting_flags()[name], help=text, metavar="VALUE")
            annotation = Annotated[str | None, option]
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    with_settings(_serve)
)


def _version() -> str:
    try:
        return metadata.version("trident")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main() -> None:
    """Run the command; an expected error becomes one line on stderr and exit status 1."""
    errors = Console(stderr=True)
    try:
        app()
    except ServerStartError as error:
        errors.print(f"[red]trident: {error}[/]", highlight=False, soft_wrap=True)
        if error.hint:
            errors.print(f"  {error.hint}", highlight=False, soft_wrap=True)
    except TridentClientError as error:
        errors.print(f"[red]trident: {error}[/]", highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    else:
        return
    raise SystemExit(1)


if __name__ == "__main__":
    main()
