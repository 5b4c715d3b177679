"""`trident gateway`: an OpenAI-compatible front of a server that runs already."""

from typing import Annotated

import typer

from client.commands.connection_options import (
    TLS,
    Header,
    ServedName,
    TLSAuthorities,
    TLSCertificate,
    TLSKey,
    TLSName,
    header_pairs,
    ssl_options,
)
from client.gateway.server import serve
from client.gateway.settings import DEFAULT_PORT, GatewaySettings
from client.request import ENSEMBLE

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def command(
    triton_url: Annotated[
        str,
        typer.Option(envvar="TRIDENT_URL", help="gRPC address of the server, host:port."),
    ] = "localhost:8001",
    host: Annotated[
        str, typer.Option(help="Address to listen on: 0.0.0.0 for those of all networks.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = DEFAULT_PORT,
    model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name that clients call the model by; repeatable. [default: its name there]"
        ),
    ] = None,
    triton_metrics_url: Annotated[
        str | None,
        typer.Option(help="host:port of the server's metrics, to be shown in /metrics too."),
    ] = None,
    served_model_name: ServedName = ENSEMBLE,
    tls: TLS = False,
    tls_ca: TLSAuthorities = None,
    tls_cert: TLSCertificate = None,
    tls_key: TLSKey = None,
    tls_name: TLSName = None,
    header: Header = None,
) -> None:
    """Serve OpenAI's API in front of a Triton server until Ctrl-C."""
    settings = GatewaySettings(
        triton_url=triton_url,
        triton_model=served_model_name,
        model_names=tuple(model_name or ()),
        metrics_url=triton_metrics_url,
        ssl=ssl_options(tls, tls_ca, tls_cert, tls_key, tls_name),
        headers=dict(header_pairs(header or ())),
    )
    serve(settings, host, port)
