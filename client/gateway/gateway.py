"""Gateway: what all requests of one gateway share."""

from __future__ import annotations

import time

from starlette.requests import Request

from client.aio import AsyncTridentClient
from client.gateway.errors import ApiError
from client.gateway.metrics import GatewayMetrics
from client.gateway.settings import GatewaySettings
from client.gateway.sse import EventEncoder


class Gateway:
    """The connection with the server, and what is known of its model.

    Attributes:
        settings: of this gateway.
        client: of the server; it tries nothing again, which is for our own clients to decide.
        metrics: this gateway's own.
        model_names: names that clients may call the model by; the first is its own.
        created: when it started, in seconds since the epoch.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises `ConfigurationError` if the server's address or a certificate is wrong."""
        self.settings = settings
        self.client = AsyncTridentClient(
            settings.triton_url,
            model=settings.triton_model,
            ssl=settings.ssl,
            headers=settings.headers,
            retry=None,
        )
        self.metrics = GatewayMetrics()
        self.model_names = settings.model_names or (settings.triton_model,)
        self.created = int(time.time())
        self.encode_event = EventEncoder()

    def model_named(self, name: str | None) -> str:
        """Return the name that answers to a request for `name` bear; None is the only model.

        Raises:
            ApiError: there is no such model.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"model: there is no model {name!r}; there is {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return name


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that `request` came to; a dependency of routes."""
    gateway: Gateway = request.app.state.gateway
    return gateway
