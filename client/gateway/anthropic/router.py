"""Routes of Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from client.errors import TridentClientError
from client.gateway.anthropic.events import EVENTS, AnsweredMessage, TokenCount
from client.gateway.anthropic.protocol import CountTokensRequest, MessagesRequest
from client.gateway.anthropic.serving import MessageCall, MessagesChat
from client.gateway.errors import from_client
from client.gateway.gateway import Gateway, gateway_of
from client.gateway.generation import check_chat
from client.gateway.http.answers import REFUSALS, JsonAnswer, documented
from client.gateway.http.disconnect import until_disconnected
from client.gateway.http.sse import EventStream
from client.gateway.routes.json_route import JsonRoute
from client.gateway.schemas.errors import AnthropicErrorBody

router = APIRouter(prefix="/v1/messages", tags=["generation"], route_class=JsonRoute)


@router.post(
    "",
    response_class=Response,
    responses=documented(AnsweredMessage, *EVENTS, errors=REFUSALS, error=AnthropicErrorBody),
)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Return the next message of a conversation, whole or as server-sent events."""
    gateway = gateway_of(request)
    call = MessageCall(gateway, body, await MessagesChat.asked(gateway, body))
    if body.stream:
        return EventStream(call.events(), is_named=True)
    return JsonAnswer(await until_disconnected(request.receive, call.answer()))


@router.post(
    "/count_tokens",
    response_class=Response,
    responses=documented(TokenCount, errors=REFUSALS, error=AnthropicErrorBody),
)
async def count_tokens(
    body: CountTokensRequest, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> Response:
    """Return how many tokens the prompt of a conversation has."""
    chat = await MessagesChat.asked(gateway, body)
    try:
        check_chat(chat.conversation.messages, chat.parameters)
        found = await gateway.client.tokenize(
            messages=chat.conversation.messages, chat_parameters=chat.parameters or None
        )
    except TridentClientError as error:
        raise chat.renamed(from_client(error)) from None
    return JsonAnswer(TokenCount(len(found.token_ids)))
