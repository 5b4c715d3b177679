"""`/tokenize` and `/detokenize`: the server's tokenizer does the work, not this process."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from client.errors import TridentClientError
from client.gateway.errors import ApiError, from_client
from client.gateway.gateway import Gateway, gateway_of
from client.gateway.generation import check_chat
from client.gateway.http.answers import REFUSALS, JsonAnswer, documented
from client.gateway.openai.serving_chat import chat_parameters
from client.gateway.routes.json_route import JsonRoute
from client.gateway.schemas.tokens import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)

router = APIRouter(tags=["tokens"], default_response_class=Response, route_class=JsonRoute)


@router.post("/tokenize", responses=documented(Tokenized, errors=REFUSALS))
async def tokenize(
    body: TokenizeRequest, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> Response:
    """Return the tokens of a prompt or of messages."""
    gateway.model_named(body.model)
    parameters = chat_parameters(body, body.tools)
    if body.messages is None and parameters:
        name = next(iter(parameters))
        raise ApiError("needs messages", param=name)
    try:
        check_chat(body.messages, parameters)
        found = await gateway.client.tokenize(
            body.prompt,
            messages=body.messages,
            chat_parameters=parameters or None,
            add_special_tokens=body.add_special_tokens,
        )
    except TridentClientError as error:
        raise from_client(error) from None
    texts = list(found.texts) if body.return_token_strs else None
    tokens = list(found.token_ids)
    return JsonAnswer(Tokenized(len(tokens), found.max_model_len, tokens, texts))


@router.post("/detokenize", responses=documented(Detokenized, errors=REFUSALS))
async def detokenize(
    body: DetokenizeRequest, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> Response:
    """Return the text of tokens."""
    gateway.model_named(body.model)
    try:
        return JsonAnswer(Detokenized(await gateway.pool.detokenize(body.tokens)))
    except TridentClientError as error:
        raise from_client(error, {"input_ids": "tokens"}) from None
