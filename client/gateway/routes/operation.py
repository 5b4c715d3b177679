"""Health, version, metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from client.errors import TridentClientError
from client.gateway.errors import ApiError, from_client
from client.gateway.gateway import Gateway, gateway_of
from client.gateway.version import version

router = APIRouter(tags=["operation"])
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/health")
async def health() -> dict[str, Any]:
    """Say that the gateway itself is up."""
    return {"status": "ok"}


@router.get("/health/ready")
async def ready(gateway: Annotated[Gateway, Depends(gateway_of)]) -> dict[str, Any]:
    """Say whether requests are taken: 503 while the server or its engine is not up."""
    try:
        found = await gateway.client.health()
    except TridentClientError as error:
        raise from_client(error) from None
    if not found.is_ready:
        detail = found.detail or f"the engine is {found.state}"
        raise ApiError(503, detail, "server_error", code="unavailable", retry_after=1)
    return {"status": "ready", "num_in_flight": found.num_in_flight}


@router.get("/version")
async def get_version() -> dict[str, Any]:
    """Return the version of Trident."""
    return {"version": version()}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the server's metrics and the gateway's own, in Prometheus' form."""
    gateway = gateway_of(request)
    text = await gateway.metrics.text(gateway.settings.metrics_url)
    return Response(text, media_type=_METRICS_TYPE)
