"""`trident serve` as the terminal shows it: loading, the addresses, then what goes wrong."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from client.commands.announcement import announce
from client.commands.gateway_process import GatewayOptions, GatewayProcess, gateway_endpoint
from client.commands.server_display import ServerLog, stopped_by_signals
from client.commands.setting_options import with_settings
from client.gateway.settings import DEFAULT_PORT
from engine.console import Console
from engine.launch.arguments import DEFAULT_HOST, split_model
from engine.launch.errors import ServerStartError
from engine.launch.ports import require_free
from engine.launch.server import TritonServer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"ignore_unknown_options": True})
@with_settings
def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|FLAG", help="The model, as with --model; settings follow as flags."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")
    ] = DEFAULT_HOST,
    model_repository: Annotated[
        Path | None, typer.Option(help="Model repository in place of Trident's own.")
    ] = None,
    openai_port: Annotated[
        str,
        typer.Option(
            "--openai-port",
            "--port",  # vLLM's
            help="Port of the OpenAI-compatible gateway; off leaves it out.",
        ),
    ] = str(DEFAULT_PORT),
    openai_workers: Annotated[
        int, typer.Option(min=1, help="Number of worker processes of the gateway.")
    ] = 1,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="API key that clients of the gateway need; repeatable. The variable "
            "TRIDENT_API_KEY gives it without showing it in process lists."
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Serve a model inside tritonserver until Ctrl-C.

    OpenAI's API is in front of it: --openai-port.

    Flags that are not listed here go to tritonserver as they are: --http-port, --grpc-port,
    --metrics-port (0 chooses a free one), --http-address, --log-verbose ...

    Endpoints that administer the server want the key of the variable TRIDENT_ADMIN_KEY; without
    one they are closed. TRIDENT_SSL_CERTFILE and TRIDENT_SSL_KEYFILE (PEM) give gRPC TLS, and
    TRIDENT_SSL_CA_CERTS wants client certificates.
    """
    model, flags = split_model(words or ())
    if model is not None and settings["model"] not in (None, model):
        raise ServerStartError(
            f"only one model can be served (got {model} and --model {settings['model']})"
        )
    chosen = settings if model is None else {**settings, "model": model}
    gateway = GatewayOptions(openai_port, host, openai_workers, tuple(api_key or ()))
    raise typer.Exit(serve(chosen, flags, gateway, model_repository, Console()))


def serve(
    settings: Mapping[str, Any],
    arguments: Sequence[str],
    gateway: GatewayOptions,
    repository: Path | None,
    console: Console,
) -> int:
    """Run a server until it is stopped; return the exit status of the command.

    Once it has been ready, the server and its gateway are started again when they have died.

    Raises:
        ServerStartError: it cannot be started.
    """
    display = ServerLog(console, everything=not console.is_terminal)
    make = partial(
        TritonServer,
        arguments=arguments,
        host=gateway.host,
        repository=repository,
        on_line=display.show,
    )
    server = make(settings)
    if server.config.tenant_key is None and gateway.asks_for_key():
        # So that only the gateway's tenants count as several.
        server = make({**settings, "tenant_key": secrets.token_urlsafe(32)})
    with stopped_by_signals():
        try:
            endpoint = gateway_endpoint(server, gateway)
            if endpoint is not None:
                require_free([*server.endpoints.values(), endpoint])
            server.prepare()
            with ExitStack() as stack:
                with display.loading(f"Starting Triton with {server.config.model}"):
                    server.launch()
                    if endpoint is None:
                        server.wait_until_ready()
                    else:  # it starts while the model is loaded
                        process = stack.enter_context(
                            GatewayProcess(server, endpoint, gateway, server.log_path)
                        )
                        server.wait_until_ready(process.check_start)
                        process.wait_until_up()
                announce(server, endpoint, gateway, display.description, console)
                server.keep_running(process.keep_running if endpoint is not None else lambda: None)
        except KeyboardInterrupt:
            if not display.is_loaded:
                return 130
            console.print("Stopping ...", highlight=False)
            return 0
        finally:
            server.stop()
