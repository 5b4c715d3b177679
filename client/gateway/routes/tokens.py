"""`/tokenize` and `/detokenize`: the server's tokenizer does the work, not this process."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from client.errors import TridentClientError
from client.gateway.chat_request import chat_parameters, message
from client.gateway.errors import from_client
from client.gateway.gateway import Gateway, gateway_of
from client.gateway.schemas.tokens import DetokenizeRequest, TokenizeRequest

router = APIRouter(tags=["tokens"])


@router.post("/tokenize")
async def tokenize(
    body: TokenizeRequest, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> dict[str, Any]:
    """Return the tokens of a prompt or of messages."""
    gateway.model_named(body.model)
    messages = None if body.messages is None else [message(each) for each in body.messages]
    parameters = chat_parameters(body, body.tools)
    try:
        found = await gateway.client.tokenize(
            body.prompt,
            messages=messages,
            chat_parameters=parameters or None,
            add_special_tokens=body.add_special_tokens,
        )
    except TridentClientError as error:
        raise from_client(error) from None
    return {
        "count": len(found.token_ids),
        "max_model_len": found.max_model_len,
        "tokens": found.token_ids,
        "token_strs": found.texts if body.return_token_strs else None,
    }


@router.post("/detokenize")
async def detokenize(
    body: DetokenizeRequest, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> dict[str, Any]:
    """Return the text of tokens."""
    gateway.model_named(body.model)
    try:
        return {"prompt": await gateway.client.detokenize(body.tokens)}
    except TridentClientError as error:
        raise from_client(error, {"input_ids": "tokens"}) from None
