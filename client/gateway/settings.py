"""GatewaySettings: the settings of a gateway, validated at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from client.connection import SSLOptions
from client.errors import ConfigurationError
from client.gateway.routing.balance import Balance
from client.gateway.security.body_limits import MAX_BUFFERED_BYTES
from client.gateway.security.tenants import Tenants
from client.request import ENSEMBLE

DEFAULT_PORT = 9000  # of Triton's own OpenAI front end


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of one gateway. Immutable.

    Raises:
        ConfigurationError: `metrics_urls` are not those of all servers.

    Attributes:
        triton_urls: gRPC addresses of the servers, as `TridentClient` takes them.
        triton_model: name of the ensemble there.
        model_names: names that clients may call the model by, the first is its own; empty:
            `triton_model`.
        metrics_urls: `host:port` of the metrics of each of them; empty: they are not shown.
        ssl: TLS with the servers.
        headers: sent with each call to the servers.
        balance: which of the servers a request goes to.
        tenants: who is let in, and how much each may ask; None: everybody.
        tenant_key: the setting of the servers, with which they take the tenants apart; None: they
            count as one there.
        allowed_origins: web sites whose pages may call the gateway; `*` for all.
        max_stored_responses: responses of each tenant that are kept for `store`; 0: none.
        max_stored_bytes: of them together, per tenant.
        max_buffered_bytes: of the bodies of requests of all connections together, until they are
            answered; several workers share it equally.
        shutdown_timeout_s: seconds that answers in flight have when it is stopped.
        ssl_certfile, ssl_keyfile: the gateway's own certificate and its key (PEM), for HTTPS.
    """

    triton_urls: tuple[str, ...] = ("localhost:8001",)
    triton_model: str = ENSEMBLE
    model_names: tuple[str, ...] = ()
    metrics_urls: tuple[str, ...] = ()
    ssl: bool | SSLOptions = False
    headers: Mapping[str, str] = field(default_factory=dict)
    balance: Balance = field(default_factory=Balance)
    tenants: Tenants | None = None
    tenant_key: str | None = field(default=None, repr=False)
    allowed_origins: tuple[str, ...] = ()
    max_stored_responses: int = 256
    max_stored_bytes: int = 64 * 2**20
    max_buffered_bytes: int = MAX_BUFFERED_BYTES
    shutdown_timeout_s: float = 30.0  # Kubernetes' grace period
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    def __post_init__(self) -> None:
        if len(self.metrics_urls) not in (0, len(self.triton_urls)):
            raise ConfigurationError(
                "must be one address for each triton_url, in the same order, or none",
                param="triton_metrics_url",
            )


SETTINGS = TypeAdapter(GatewaySettings)  # as JSON, for another process
