"""`/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from client.gateway.chat.call import ChatCall
from client.gateway.gateway import gateway_of
from client.gateway.http.answers import REFUSALS, JsonAnswer, documented
from client.gateway.http.disconnect import until_disconnected
from client.gateway.http.sse import EventStream
from client.gateway.routes.json_route import JsonRoute
from client.gateway.schemas.answers import ChatCompletion, ChatCompletionChunk
from client.gateway.schemas.chat import ChatRequest

router = APIRouter(prefix="/v1", tags=["generation"], route_class=JsonRoute)


@router.post(
    "/chat/completions",
    response_class=Response,
    responses=documented(ChatCompletion, ChatCompletionChunk, errors=REFUSALS),
)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a chat, whole or as server-sent events."""
    call = ChatCall(gateway_of(request), body)
    if body.stream:
        return EventStream(call.events())
    return JsonAnswer(await until_disconnected(request.receive, call.answer()))
