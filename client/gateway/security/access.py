"""Access: no route answers without a key, but for a few that reveal nothing."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from client.gateway.errors import ApiError
from client.gateway.routes import page
from client.gateway.security.quotas import Quotas
from client.gateway.security.tenants import Tenant

# Probes of a cluster have no keys, and learn no more than whether the gateway and a server are up.
# The page itself asks its user for the key.
OPEN_PATHS = frozenset({"/health", "/health/ready"}) | page.PATHS
_READS = frozenset({"GET", "HEAD"})


class Access:
    """Asks every request for its key, whatever its route, and holds its tenant to the limits.

    The tenant is then found by `tenant_of`.
    """

    def __init__(self, app: ASGIApp, quotas: Quotas) -> None:
        self._app = app
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "lifespan" and not _is_open(scope):
            try:
                scope.setdefault("state", {})["tenant"] = self._admitted(scope)
            except ApiError as error:
                response = error.response(scope)
                if error.status == 401:
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admitted(self, scope: Scope) -> Tenant:
        key = _key(scope)
        tenant = None if key is None else self._quotas.tenants.with_key(key)
        if tenant is None:
            wrong = "no API key is given" if key is None else "the API key is not valid"
            raise ApiError(
                f"{wrong}; send one as `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )
        if scope["method"] not in _READS:
            self._quotas.admit(tenant)
        return tenant


def tenant_of(scope: Scope) -> Tenant | None:
    """Return who sent a request; None if no keys are asked for."""
    tenant: Tenant | None = scope.get("state", {}).get("tenant")
    return tenant


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS and scope["method"] in _READS


def _key(scope: Scope) -> bytes | None:
    """Return the key of a request, in OpenAI's header or in Anthropic's."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return headers.get(b"x-api-key") or None
