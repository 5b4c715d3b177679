"""Health, version, metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from client.errors import TridentClientError
from client.gateway.errors import ApiError, from_client
from client.gateway.gateway import Gateway, gateway_of
from client.gateway.http.answers import JsonAnswer, documented
from client.gateway.schemas.operation import Health, Readiness, Version
from client.gateway.version import version

router = APIRouter(tags=["operation"], default_response_class=Response)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METRICS = {"description": "The metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}


@router.get("/health", responses=documented(Health))
async def health() -> Response:
    """Answer 200 while the gateway itself is up."""
    return JsonAnswer(Health())


@router.get("/health/ready", responses=documented(Readiness, errors=[503]))
async def ready(gateway: Annotated[Gateway, Depends(gateway_of)]) -> Response:
    """Answer 200 while requests are taken, and 503 while the server or its engine is not up."""
    try:
        found = await gateway.pool.health()
    except TridentClientError as error:
        raise from_client(error) from None
    if not found.is_ready:
        detail = found.detail or f"the engine is {found.state}"
        raise ApiError(detail, code="unavailable", retry_after=1)
    return JsonAnswer(Readiness(found.num_in_flight))


@router.get("/version", responses=documented(Version))
async def get_version() -> Response:
    """Return the version of Trident."""
    return JsonAnswer(Version(version()))


@router.get("/metrics", responses={200: _METRICS})
async def metrics(request: Request) -> Response:
    """Return the servers' metrics and the gateway's own, in Prometheus' form."""
    gateway = gateway_of(request)
    settings = gateway.settings
    addresses = dict(zip(settings.triton_urls, settings.metrics_urls, strict=False))
    text = await gateway.metrics.text(addresses)
    return Response(text, media_type=_METRICS_TYPE)
