"""The list of models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from client.gateway.gateway import Gateway, gateway_of
from client.gateway.http.answers import JsonAnswer, documented
from client.gateway.schemas.operation import ModelCard, ModelList

router = APIRouter(prefix="/v1", tags=["models"], default_response_class=Response)


@router.get("/models", responses=documented(ModelList))
async def models(gateway: Annotated[Gateway, Depends(gateway_of)]) -> Response:
    """List the names that the model can be called by."""
    names = gateway.model_names
    return JsonAnswer(ModelList([_card(gateway, name) for name in names], names[0], names[-1]))


@router.get("/models/{name:path}", responses=documented(ModelCard, errors=[404]))
async def model(name: str, gateway: Annotated[Gateway, Depends(gateway_of)]) -> Response:
    """Describe one of them."""
    return JsonAnswer(_card(gateway, gateway.model_named(name)))


def _card(gateway: Gateway, name: str) -> ModelCard:
    created_at = datetime.fromtimestamp(gateway.created, UTC)
    return ModelCard(name, gateway.created, gateway.model_names[0], name, created_at)
