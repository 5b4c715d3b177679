"""Routes of OpenAI's API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from client.gateway.gateway import gateway_of
from client.gateway.http.answers import REFUSALS, JsonAnswer, documented
from client.gateway.http.disconnect import until_disconnected
from client.gateway.http.sse import EventStream
from client.gateway.openai.protocol import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    Completion,
    CompletionRequest,
    Embeddings,
    EmbeddingsRequest,
)
from client.gateway.openai.serving_chat import ChatCall
from client.gateway.openai.serving_completions import CompletionCall
from client.gateway.openai.serving_embeddings import embeddings
from client.gateway.routes.json_route import JsonRoute

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


@router.post(
    "/embeddings",
    response_class=Response,
    responses=documented(Embeddings, errors=REFUSALS),
)
async def embed(body: EmbeddingsRequest, request: Request) -> Response:
    """Embed one or several texts."""
    asked = embeddings(gateway_of(request), body)
    return JsonAnswer(await until_disconnected(request.receive, asked))
