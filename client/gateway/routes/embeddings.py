"""`/v1/embeddings`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from client.gateway.embeddings import embeddings
from client.gateway.gateway import gateway_of
from client.gateway.http.answers import REFUSALS, JsonAnswer, documented
from client.gateway.http.disconnect import until_disconnected
from client.gateway.routes.json_route import JsonRoute
from client.gateway.schemas.embeddings import Embeddings, EmbeddingsRequest

router = APIRouter(prefix="/v1", tags=["generation"], route_class=JsonRoute)


@router.post(
    "/embeddings",
    response_class=Response,
    responses=documented(Embeddings, errors=REFUSALS),
)
async def embed(body: EmbeddingsRequest, request: Request) -> Response:
    """Embed one or several texts."""
    asked = embeddings(gateway_of(request), body)
    return JsonAnswer(await until_disconnected(request.receive, asked))
