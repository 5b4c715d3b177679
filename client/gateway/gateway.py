"""Gateway: what all requests of one gateway share."""

from __future__ import annotations

import time
from copy import copy

from starlette.requests import Request

from client.gateway.errors import ApiError
from client.gateway.metrics import GatewayMetrics
from client.gateway.routing.pool import ServerPool
from client.gateway.security.access import tenant_of
from client.gateway.security.quotas import Quotas
from client.gateway.security.tenant_client import TenantClient
from client.gateway.security.tenants import Tenant, read_tenants
from client.gateway.settings import GatewaySettings
from client.gateway.sse import EventEncoder
from client.gateway.tool_format import ToolFormat


class Gateway:
    """The connections with the servers, and what is known of their model.

    Attributes:
        settings: of this gateway.
        pool: the servers.
        client: the servers as whoever asks may use them.
        quotas: who may ask, and how much; None: everybody may.
        metrics: this gateway's own.
        tool_format: the form in which the model calls tools.
        model_names: names that clients may call the model by; the first is its own.
        created: when it started, in seconds since the epoch.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises `ConfigurationError` if an address, a certificate or the file of keys is wrong."""
        self.settings = settings
        self.pool = ServerPool(
            settings.triton_urls,
            balance=settings.balance,
            model=settings.triton_model,
            ssl=settings.ssl,
            headers=settings.headers,
        )
        self.client: ServerPool | TenantClient = self.pool
        tenants = read_tenants(settings.api_keys, settings.api_key_file)
        self.quotas = None if tenants is None else Quotas(tenants)
        self.metrics = GatewayMetrics(self.pool)
        self.model_names = settings.model_names or (settings.triton_model,)
        self.created = int(time.time())
        self.encode_event = EventEncoder()
        self.tool_format = ToolFormat(self.pool)

    def for_tenant(self, tenant: Tenant) -> Gateway:
        """Return the same gateway, whose requests are this tenant's."""
        assert self.quotas is not None, "tenants are known by their keys"
        theirs = copy(self)
        theirs.client = TenantClient(self.pool, tenant, self.quotas)
        return theirs

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
    """Return the gateway that `request` came to, for who sent it; a dependency of routes."""
    gateway: Gateway = request.app.state.gateway
    tenant = tenant_of(request.scope)
    return gateway if tenant is None else gateway.for_tenant(tenant)
