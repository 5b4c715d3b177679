"""The application: routes, errors, life and end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware

from client.gateway.errors import HANDLERS
from client.gateway.gateway import Gateway
from client.gateway.http.document import complete_document
from client.gateway.observability.middleware import RequestLog
from client.gateway.routes import (
    chat,
    completions,
    embeddings,
    messages,
    models,
    operation,
    page,
    responses,
    tokens,
)
from client.gateway.security.access import Access
from client.gateway.security.body_limits import BodyLimits
from client.gateway.settings import GatewaySettings
from client.gateway.version import version


def create_app(settings: GatewaySettings, shared: Path | None = None) -> FastAPI:
    """Return a gateway as an ASGI application.

    Args:
        settings: of it.
        shared: as in `Gateway`.

    Raises:
        ConfigurationError: a setting is wrong.
    """
    gateway = Gateway(settings, shared)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with closing(gateway.responses):
            async with gateway.pool:
                yield

    app = FastAPIOffline(
        title="Trident",
        description="OpenAI's and Anthropic's APIs for models in NVIDIA Triton Inference Server.",
        version=version(),
        lifespan=lifespan,
        exception_handlers=dict(HANDLERS),
        redoc_url=None,
    )
    app.state.gateway = gateway
    # The last one is the first to see a request.
    app.add_middleware(BodyLimits, max_buffered_bytes=settings.max_buffered_bytes)
    if gateway.quotas is not None:
        app.add_middleware(Access, quotas=gateway.quotas)
    if origins := settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["DELETE", "GET", "POST"],
            allow_headers=["*"],
        )
    app.add_middleware(RequestLog, metrics=gateway.metrics)
    complete_document(app, has_keys=gateway.quotas is not None)
    every = (completions, chat, responses, messages, embeddings, tokens, models, operation, page)
    for routes in every:
        app.include_router(routes.router)
    return app
