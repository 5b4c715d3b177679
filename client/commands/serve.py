"""`trident serve` as the terminal shows it: loading, the addresses, then what goes wrong."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from client.commands.server_display import ServerLog, stopped_by_signals
from client.commands.setting_options import with_settings
from engine.demo.prompts import DEMO_PROMPTS
from engine.launch import server_log
from engine.launch.arguments import DEFAULT_HOST, split_model
from engine.launch.errors import ServerStartError, StageDiedError
from engine.launch.model_configs import ENSEMBLE
from engine.launch.security import ADMIN_KEY, GRPC_HEADER, HTTP_HEADER
from engine.launch.server import TritonServer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"ignore_unknown_options": True})
@with_settings
def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL|FLAG", help="The model, as --model; flags as below."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on: 0.0.0.0 for those of all networks.")
    ] = DEFAULT_HOST,
    model_repository: Annotated[
        Path | None, typer.Option(help="Another model repository than Trident's own.")
    ] = None,
    **settings: Any,
) -> None:
    """Serve a model inside tritonserver until Ctrl-C.

    Flags that are not listed here go to tritonserver as they are: --http-port, --grpc-port,
    --metrics-port (0 chooses a free one), --http-address, --log-verbose ...

    Endpoints that administer the server want the key of the variable TRIDENT_ADMIN_KEY; without
    one they are closed. TRIDENT_SSL_CERTFILE and TRIDENT_SSL_KEYFILE (PEM) give gRPC TLS, and
    TRIDENT_SSL_CA_CERTS wants client certificates.
    """
    model, flags = split_model(words or ())
    if model is not None and settings["model"] not in (None, model):
        raise ServerStartError(f"two models: {model} and --model {settings['model']}")
    chosen = settings if model is None else {**settings, "model": model}
    raise typer.Exit(serve(chosen, flags, host, model_repository, Console()))


def serve(
    settings: Mapping[str, Any],
    arguments: Sequence[str],
    host: str,
    repository: Path | None,
    console: Console,
) -> int:
    """Run a server until it is told to stop; return the exit status of the command.

    Raises:
        ServerStartError: it cannot be started.
    """
    display = ServerLog(console, everything=not console.is_terminal)
    server = TritonServer(
        settings, arguments=arguments, host=host, repository=repository, on_line=display.show
    )
    with stopped_by_signals():
        try:
            server.prepare()
            with display.loading(f"Starting Triton with {server.config.model}"):
                server.start()
            _announce(server, display.description, console)
            status = server.follow()
        except KeyboardInterrupt:
            if not display.is_loaded:
                return 130
            console.print("Stopping ...", highlight=False)
            return 0
        except StageDiedError as error:
            console.print(f"[red]{error}[/]; start the server again", highlight=False)
            _name_log(server, console)
            return 1
        finally:
            server.stop()
    reason, hint = server_log.failure(server.log)
    console.print(f"[red]tritonserver died (exit status {status}):[/] {escape(reason)}")
    if hint:
        console.print(escape(hint))
    _name_log(server, console)
    return 1


def _name_log(server: TritonServer, console: Console) -> None:
    console.print(f"log: {server.log_path}", markup=False, highlight=False, soft_wrap=True)


def curl_line(server: TritonServer) -> str:
    """Return a command line that asks `server` something it can answer."""
    body: dict[str, Any] = {"max_tokens": 64, "exclude_input_in_output": True}
    if server.config.model == "demo":
        body = {"messages": json.dumps([{"role": "user", "content": DEMO_PROMPTS[0]}])} | body
    else:
        body = {"text_input": "The capital of France is"} | body
    url = f"{server.http_url}/v2/models/{server.model}/generate"
    return f"curl -s {url} -d {shlex.quote(json.dumps(body))}"


def own_name() -> str:
    """Return what starts this command in the user's shell, whose PATH need not have it."""
    return "trident" if shutil.which("trident") else shlex.quote(sys.argv[0])


def _announce(server: TritonServer, description: str, console: Console) -> None:
    def line(text: str = "") -> None:
        console.print(text, soft_wrap=True, highlight=False)

    line(f"[bold green]Trident is ready.[/] {escape(description)}")
    line()
    named = f', model="{server.model}"' if server.model != ENSEMBLE else ""
    arguments = named + (", ssl=True" if server.tls else "")
    urls = {
        "grpc": (
            "gRPC",
            f"{{}}{' with TLS' if server.tls else ''}  "
            f'[dim](model "{server.model}"; '
            f'TridentClient("{{}}"{arguments}))[/]',
        ),
        "http": (
            "HTTP",
            f"http://{{}}/v2/models/{server.model}/generate [dim]and[/] /generate_stream",
        ),
        "metrics": ("metrics", "http://{}/metrics"),
    }
    for name, (title, address) in urls.items():
        if name in server.endpoints:
            line(f"  {title:<8} {address.replace('{}', server.endpoints[name].url)}")
    line(f"  {'log':<8} {server.log_path}")
    line()
    for text in _security(server):
        line(f"[dim]{escape(text)}[/]")
    line()
    if "http" in server.endpoints:
        line("Try it:")
        console.out(curl_line(server), highlight=False)
    if "grpc" in server.endpoints and not server.tls:
        console.out(f"{own_name()} chat --url {server.grpc_url}", highlight=False)
    line()
    line("[dim]Ctrl-C stops the server.[/]")


def _security(server: TritonServer) -> Iterator[str]:
    """Yield what the operator should know of who can do what, one line each."""
    if any(each.address == DEFAULT_HOST for each in server.endpoints.values()):
        yield "Other machines reach it with --host 0.0.0.0 only."
    if server.administration_open:
        yield (
            f"Administration (model repository, shared memory, trace, logging) wants the header "
            f"{HTTP_HEADER} (gRPC: {GRPC_HEADER})."
        )
    else:
        yield f"Administration is closed; to open it, set {ADMIN_KEY} and send it as {HTTP_HEADER}."
    if server.tls and "http" in server.endpoints:
        yield (
            "gRPC is encrypted, HTTP is not: tritonserver has no TLS for it. Put a proxy before it "
            "(--http-address=127.0.0.1), or switch it off (--allow-http=false)."
        )
