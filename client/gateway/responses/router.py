"""Routes of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from client.gateway.errors import ApiError
from client.gateway.gateway import Gateway, gateway_of
from client.gateway.http.answers import REFUSALS, JsonAnswer, documented
from client.gateway.http.disconnect import until_disconnected
from client.gateway.http.sse import EventStream
from client.gateway.responses.history import StoredResponse
from client.gateway.responses.items import page
from client.gateway.responses.protocol import InputItemsQuery, ResponseRequest, RetrieveQuery
from client.gateway.responses.resource import EVENTS, DeletedResponse, ItemList
from client.gateway.responses.resource import Response as Resource
from client.gateway.responses.serving import ResponseCall
from client.gateway.routes.json_route import JsonRoute

router = APIRouter(
    prefix="/v1/responses",
    tags=["generation"],
    default_response_class=Response,
    route_class=JsonRoute,
)
_Gateway = Annotated[Gateway, Depends(gateway_of)]


@router.post("", responses=documented(Resource, *EVENTS, errors=REFUSALS))
async def create(body: ResponseRequest, request: Request) -> Response:
    """Answer a conversation, whole or as server-sent events."""
    call = ResponseCall(gateway_of(request), body)
    if body.stream:
        return EventStream(call.events())
    answer = await until_disconnected(request.receive, call.answer())
    return JsonAnswer(answer)


@router.get("/{response_id}", responses=documented(Resource, errors=[400, 404]))
async def retrieve(
    response_id: str, gateway: _Gateway, query: Annotated[RetrieveQuery, Query()]
) -> Response:
    """Return a response that was stored."""
    stored = await _stored(gateway, response_id)
    return Response(stored.response, media_type="application/json")


@router.delete("/{response_id}", responses=documented(DeletedResponse, errors=[404, 429]))
async def delete(response_id: str, gateway: _Gateway) -> Response:
    """Drop a response that was stored."""
    if not await gateway.responses.delete(gateway.owner, response_id):
        raise _missing(response_id)
    return JsonAnswer(DeletedResponse(response_id))


@router.get("/{response_id}/input_items", responses=documented(ItemList, errors=[400, 404]))
async def input_items(
    response_id: str, gateway: _Gateway, query: Annotated[InputItemsQuery, Query()]
) -> Response:
    """List the items that a stored response answers, those of earlier turns among them."""
    stored = await _stored(gateway, response_id)
    return JsonAnswer(await asyncio.to_thread(page, stored.input, query))


async def _stored(gateway: Gateway, response_id: str) -> StoredResponse:
    stored = await gateway.responses.get(gateway.owner, response_id)
    if stored is None:
        raise _missing(response_id)
    return stored


def _missing(response_id: str) -> ApiError:
    return ApiError(f"there is no response {response_id!r}", param="response_id", code="not_found")
