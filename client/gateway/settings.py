"""GatewaySettings: what a gateway is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from client.connection import SSLOptions
from client.gateway.routing.balance import Balance
from client.request import ENSEMBLE

DEFAULT_PORT = 9000  # of Triton's own OpenAI front end


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of one gateway. Immutable.

    Attributes:
        triton_urls: gRPC addresses of the servers, as `TridentClient` takes them.
        triton_model: name of the ensemble there.
        model_names: names that clients may call the model by, the first is its own; empty:
            `triton_model`.
        metrics_url: `host:port` of the server's metrics; None: they are not shown.
        ssl: TLS with the servers.
        headers: sent with each call to the servers.
        balance: which of the servers a request goes to.
        api_keys: each lets someone in, without limits.
        api_key_file: tenants, the hashes of their keys and their limits (TOML). Without keys and
            file everybody is let in.
        allowed_origins: web sites whose pages may call the gateway; `*` for all.
        ssl_certfile, ssl_keyfile: the gateway's own certificate and its key (PEM), for HTTPS.
    """

    triton_urls: tuple[str, ...] = ("localhost:8001",)
    triton_model: str = ENSEMBLE
    model_names: tuple[str, ...] = ()
    metrics_url: str | None = None
    ssl: bool | SSLOptions = False
    headers: Mapping[str, str] = field(default_factory=dict)
    balance: Balance = field(default_factory=Balance)
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
