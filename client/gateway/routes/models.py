"""The list of models."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from client.gateway.gateway import Gateway, gateway_of

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models")
async def models(gateway: Annotated[Gateway, Depends(gateway_of)]) -> dict[str, Any]:
    """List the names that the model can be called by."""
    return {"object": "list", "data": [_card(gateway, name) for name in gateway.model_names]}


@router.get("/models/{name:path}")
async def model(name: str, gateway: Annotated[Gateway, Depends(gateway_of)]) -> dict[str, Any]:
    """Describe one of them."""
    return _card(gateway, gateway.model_named(name))


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
    root = gateway.model_names[0]
    return {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "trident",
        "root": root,
    }
