"""The `trident` command."""

import inspect
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from client.bench.cli import app as bench
from client.commands.connection_options import connected
from client.errors import TridentClientError
from client.protocol import SamplingOptions
from engine.config import EngineConfig
from engine.errors import TridentError
from engine.launch.arguments import setting_flags
from engine.launch.errors import ServerStartError

if TYPE_CHECKING:
    from client.client import TridentClient

app = typer.Typer(
    name="trident",
    help="Serve language models inside NVIDIA Triton Inference Server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(bench, name="bench")

MaxTokens = Annotated[
    int | None, typer.Option(help="Tokens to answer with at most; default: what fits.")
]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; default: what the model's makers chose.")
]


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

    Endpoints that administer the server want the key of the variable TRIDENT_ADMIN_KEY; without
    one they are closed. TRIDENT_SSL_CERTFILE and TRIDENT_SSL_KEYFILE (PEM) give gRPC TLS, and
    TRIDENT_SSL_CA_CERTS wants client certificates.
    """
    from client.commands.serve import serve

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


@app.command()
@connected
def generate(
    client: "TridentClient",
    prompt: Annotated[str, typer.Argument(help="The question, or with --raw the text to go on.")],
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Through the model's chat template, or not.")
    ] = True,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
) -> None:
    """Print what the model answers to a prompt, as it comes."""
    from client.commands.chat import generate

    client.health()  # which says at once what is wrong, where a request would be tried again
    sampling = _sampling(max_tokens, temperature)
    if chat:
        chunks = client.stream(messages=[{"role": "user", "content": prompt}], **sampling)
    else:
        chunks = client.stream(prompt, **sampling)
    generate(chunks, Console())


@app.command()
@connected
def chat(
    client: "TridentClient",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
) -> None:
    """Talk with the model: Ctrl-C stops an answer, Ctrl-D or /exit ends."""
    import readline  # noqa: F401 (gives input() editing and history)

    from client.commands.chat import Chat

    client.health()
    Chat(client, Console(), system=system, sampling=_sampling(max_tokens, temperature)).run()


@app.command()
@connected
def health(
    client: "TridentClient",
    generate: Annotated[
        bool, typer.Option("--generate", help="Generate a token, through all stages.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for all of it.")] = 10,
) -> None:
    """Say in one line whether the server is well; the exit status is 1 if it is not."""
    from client.commands.health import check

    typer.echo(check(client, generate=generate, timeout=timeout))


@app.command()
def demo() -> None:
    """Start the real server on the bundled model and ask it several questions at once."""
    from client.commands.demo import run

    raise typer.Exit(run(Console()))


def _sampling(max_tokens: int | None, temperature: float | None) -> SamplingOptions:
    """Return the options that were given; the rest is the server's choice."""
    options = SamplingOptions(max_tokens=max_tokens)
    if temperature is not None:
        options["temperature"] = temperature
    return options


def _version() -> str:
    try:
        return metadata.version("trident")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main() -> None:
    """Run the command; an expected error becomes one line on stderr and exit status 1."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it tells the terminal of each lost peer
    try:
        app()
    except (TridentClientError, TridentError) as error:
        _complain(f"trident: {error}", style="red")
        if isinstance(error, ServerStartError) and error.hint:
            _complain(f"  {error.hint}")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    else:
        return
    raise SystemExit(1)


def _complain(text: str, style: str | None = None) -> None:
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
