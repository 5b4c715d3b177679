"""`/v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from client.gateway.completions import CompletionCall
from client.gateway.gateway import gateway_of
from client.gateway.http.answers import REFUSALS, JsonAnswer, documented
from client.gateway.http.disconnect import until_disconnected
from client.gateway.http.sse import EventStream
from client.gateway.routes.json_route import JsonRoute
from client.gateway.schemas.answers import Completion
from client.gateway.schemas.completions import CompletionRequest

router = APIRouter(prefix="/v1", tags=["generation"], route_class=JsonRoute)


@router.post(
    "/completions",
    response_class=Response,
    responses=documented(Completion, Completion, errors=REFUSALS),
)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts, whole or as server-sent events."""
    call = CompletionCall(gateway_of(request), body)
    if body.stream:
        return EventStream(call.events())
    return JsonAnswer(await until_disconnected(request.receive, call.answer()))
