"""`trident gateway`: an OpenAI-compatible front of servers that run already."""

from pathlib import Path
from typing import Annotated

import typer

from client.commands.connection_options import Access, access, with_options
from client.gateway.processes.server import serve
from client.gateway.routing.balance import Balance
from client.gateway.security.tenants import read_tenants
from client.gateway.settings import DEFAULT_PORT, GatewaySettings

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_BALANCE = Balance()


@app.command()
@with_options(access)
def command(
    given: Access,
    triton_url: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TRIDENT_URL",
            help="Address of a Triton server's gRPC service, host:port; repeatable. [default: "
            "localhost:8001]",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = DEFAULT_PORT,
    workers: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Model name that clients use in requests; repeatable. [default: the model's name "
            "on the server]"
        ),
    ] = None,
    triton_metrics_url: Annotated[
        list[str] | None,
        typer.Option(
            help="host:port of a server's metrics, which /metrics of the gateway then includes; "
            "one for each --triton-url, in the same order."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="TRIDENT_API_KEY", help="API key that clients may use; repeatable."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TRIDENT_API_KEY_FILE",
            help="TOML file of tenants, hashes of their API keys, and their limits.",
        ),
    ] = None,
    tenant_key: Annotated[
        str | None,
        typer.Option(
            envvar="TRIDENT_TENANT_KEY",
            help="Value of the servers' setting tenant_key; servers then schedule the tenants of "
            "the API keys fairly.",
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of a web site whose pages may call the gateway (CORS); repeatable."
        ),
    ] = None,
    max_stored_responses: Annotated[
        int,
        typer.Option(min=0, help="Number of responses per tenant that `store` keeps; 0: none."),
    ] = GatewaySettings.max_stored_responses,
    max_stored_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes of stored responses per tenant.")
    ] = GatewaySettings.max_stored_bytes,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds that answers in flight get to finish when the gateway is stopped."
        ),
    ] = GatewaySettings.shutdown_timeout_s,
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="Certificate of the gateway (PEM), for HTTPS.")
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="Private key of the certificate (PEM).")
    ] = None,
    cache_threshold: Annotated[
        float,
        typer.Option(
            help="Share of a prompt that a server must have cached (0 to 1) to be chosen for it."
        ),
    ] = _BALANCE.cache_threshold,
    balance_abs_threshold: Annotated[
        int,
        typer.Option(
            help="Imbalance threshold: difference of running requests to the least loaded server."
        ),
    ] = _BALANCE.balance_abs_threshold,
    balance_rel_threshold: Annotated[
        float,
        typer.Option(
            help="Imbalance threshold: ratio of running requests to the least loaded server."
        ),
    ] = _BALANCE.balance_rel_threshold,
) -> None:
    """Serve OpenAI's API in front of Triton servers until Ctrl-C."""
    settings = GatewaySettings(
        triton_urls=tuple(triton_url or ("localhost:8001",)),
        triton_model=given.model,
        model_names=tuple(model_name or ()),
        metrics_urls=tuple(triton_metrics_url or ()),
        ssl=given.ssl,
        headers=given.headers,
        balance=Balance(cache_threshold, balance_abs_threshold, balance_rel_threshold),
        tenants=read_tenants(api_key or (), api_key_file),
        tenant_key=tenant_key or None,
        allowed_origins=tuple(allowed_origin or ()),
        max_stored_responses=max_stored_responses,
        max_stored_bytes=max_stored_bytes,
        shutdown_timeout_s=shutdown_timeout,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
    )
    serve(settings, host, port, workers)
