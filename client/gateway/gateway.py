"""Gateway: the state that all requests of one gateway share, and the served model's facts."""

from __future__ import annotations

import asyncio
import time
from copy import copy
from pathlib import Path

from starlette.requests import Request

from client.errors import TridentClientError
from client.gateway.errors import ApiError, from_client, unsupported
from client.gateway.http.sse import EventEncoder
from client.gateway.observability.metrics import GatewayMetrics
from client.gateway.responses.history import ResponseStore
from client.gateway.routing.pool import ServerPool
from client.gateway.security.access import tenant_of
from client.gateway.security.quotas import Quotas
from client.gateway.security.tenant_client import TenantClient
from client.gateway.security.tenants import Tenant
from client.gateway.settings import GatewaySettings
from client.gateway.tool_parsers import TOOL_PARSERS, ToolParser
from client.protocol import Health

_KNOWN_S = 60.0  # how long what they have said is taken for true


class ServedModel:
    """Asks the servers when it is needed, and keeps the answer.

    After a minute it asks again, and meanwhile what they said holds.
    """

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._known: Health | None = None
        self._asked_at = 0.0
        self._asking: asyncio.Task[Health] | None = None

    async def facts(self) -> Health:
        """Return what they say.

        Raises:
            ApiError: no server has answered yet.
        """
        if self._known is None:
            try:
                return await asyncio.shield(self._ask())  # who goes takes it from nobody else
            except TridentClientError as error:
                raise from_client(error) from None
        if time.monotonic() - self._asked_at > _KNOWN_S:
            self._ask()
        return self._known

    def _ask(self) -> asyncio.Task[Health]:
        """Return the question that is open; begin one if there is none."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._pool.health())
            self._asking.add_done_callback(self._told)
        return self._asking

    def _told(self, asked: asyncio.Task[Health]) -> None:
        self._asking = None
        if not asked.cancelled() and asked.exception() is None:
            self._known, self._asked_at = asked.result(), time.monotonic()

    async def tool_parser(self) -> ToolParser:
        """Return the parser of the model's tool calls.

        Raises:
            ApiError: it is not known, or no server answers.
        """
        name = (await self.facts()).tool_call_parser
        if name not in TOOL_PARSERS:
            raise unsupported(
                "tools",
                "not supported by this model: its chat template does not use tools, or in an "
                f"unknown format (tool_call_parser is {name})",
            )
        return TOOL_PARSERS[name]


class Gateway:
    """The connections with the servers, and what is known of their model.

    Attributes:
        settings: of this gateway.
        pool: the servers.
        client: their answers, as whoever asks may have them.
        quotas: who may ask, and how much; None: everybody may.
        metrics: this gateway's own.
        served_model: what is known of the model.
        responses: those that are kept.
        owner: whose requests these are, for `responses`; "" if there are no keys.
        model_names: names that clients may call the model by; the first is its own.
        created: when it started, in seconds since the epoch.
    """

    def __init__(self, settings: GatewaySettings, shared: Path | None = None) -> None:
        """Make what the requests need.

        Args:
            settings: of this gateway.
            shared: a folder for what the workers of a gateway share; None: this is all of it.

        Raises:
            ConfigurationError: an address or a certificate is wrong.
        """
        self.settings = settings
        self.pool = ServerPool(
            settings.triton_urls,
            balance=settings.balance,
            model=settings.triton_model,
            ssl=settings.ssl,
            headers=settings.headers,
        )
        self.client: ServerPool | TenantClient = self.pool
        self.quotas = None
        if settings.tenants is not None:
            self.quotas = Quotas(settings.tenants, file=shared and shared / "quotas")
        self.metrics = GatewayMetrics(self.pool, shared)
        self.model_names = settings.model_names or (settings.triton_model,)
        self.created = int(time.time())
        self.encode_event = EventEncoder()
        self.served_model = ServedModel(self.pool)
        self.responses = ResponseStore(
            settings.max_stored_responses,
            settings.max_stored_bytes,
            file=shared and shared / "responses",
        )
        self.owner = ""

    def for_tenant(self, tenant: Tenant) -> Gateway:
        """Return the same gateway, whose requests are this tenant's."""
        assert self.quotas is not None, "tenants are known by their keys"
        theirs = copy(self)
        theirs.client = TenantClient(self.pool, tenant, self.quotas, self.settings.tenant_key)
        theirs.owner = tenant.digests[0].hex()
        return theirs

    def model_named(self, name: str | None) -> str:
        """Return the model name to put in the response; None names the first model.

        Raises:
            ApiError: there is no such model.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                f"the model {name!r} does not exist; available: {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return name


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that `request` came to, for who sent it; a dependency of routes."""
    gateway: Gateway = request.app.state.gateway
    tenant = tenant_of(request.scope)
    return gateway if tenant is None else gateway.for_tenant(tenant)
