"""GatewaySettings: what a gateway is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from client.connection import SSLOptions
from client.request import ENSEMBLE

DEFAULT_PORT = 9000  # of Triton's own OpenAI front end


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of one gateway. Immutable.

    Attributes:
        triton_url: gRPC address of the server, as `TridentClient` takes it.
        triton_model: name of the ensemble there.
        model_names: names that clients may call the model by, the first is its own; empty:
            `triton_model`.
        metrics_url: `host:port` of the server's metrics; None: they are not shown.
        ssl: TLS with the server.
        headers: sent with each call to the server.
    """

    triton_url: str = "localhost:8001"
    triton_model: str = ENSEMBLE
    model_names: tuple[str, ...] = ()
    metrics_url: str | None = None
    ssl: bool | SSLOptions = False
    headers: Mapping[str, str] = field(default_factory=dict)
