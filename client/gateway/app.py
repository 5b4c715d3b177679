"""The FastAPI application: routes, error handlers, start and shutdown, and OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from msgspec import Struct
from starlette.middleware.cors import CORSMiddleware

from client.gateway.anthropic import router as anthropic
from client.gateway.errors import HANDLERS, is_anthropic
from client.gateway.gateway import Gateway
from client.gateway.http.answers import documented_error
from client.gateway.observability.middleware import RequestLog
from client.gateway.openai import router as openai
from client.gateway.responses import router as responses
from client.gateway.routes import models, operation, page, tokens
from client.gateway.schemas.errors import AnthropicErrorBody, ErrorBody
from client.gateway.security.access import OPEN_PATHS, Access
from client.gateway.security.body_limits import BodyLimits
from client.gateway.settings import GatewaySettings
from client.gateway.version import version

# The size of a request, its speed, and faults: the same for every route.
_ANYWHERE = (408, 413, 431, 500)
_KEY = "APIKey"


def complete_document(app: FastAPI, *, has_keys: bool) -> None:
    """Complete the OpenAPI document of `app` with all of its statuses and schemas.

    Args:
        app: whose routes declare by `answers.documented` what they answer.
        has_keys: whether routes ask for one.
    """
    of_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = of_fastapi()
            for path, operation in _operations(made):
                needs_key = has_keys and path not in OPEN_PATHS
                statuses = (*_ANYWHERE, 401) if needs_key else _ANYWHERE
                _complete(operation, statuses, _error_of(path))
                if needs_key:
                    operation["security"] = [{_KEY: []}]
            app.openapi_schema = _with_components(made, has_keys=has_keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation does


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for each in methods.values():
            yield path, each


def _error_of(path: str) -> type[Struct]:
    return AnthropicErrorBody if is_anthropic(path) else ErrorBody


def _complete(operation: dict[str, Any], statuses: tuple[int, ...], error: type[Struct]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own; ours have status 400
    for status in statuses:
        responses.setdefault(str(status), documented_error(status, error))


def _with_components(document: dict[str, Any], *, has_keys: bool) -> dict[str, Any]:
    """Move the definitions that are inside of schemas to where all have theirs.

    Those of answers, of which a request has another of the same name, get FastAPI's `-Output`.
    """
    definitions = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        definitions.pop(name, None)

    of_requests = frozenset(definitions)

    def named(name: str) -> str:
        return f"{name}-Output" if name in of_requests else name

    def moved(value: dict[str, Any]) -> dict[str, Any]:
        for name, schema in value.pop("$defs", {}).items():
            if definitions.setdefault(named(name), schema) != schema:
                raise ValueError(f"two schemas are called {name}")
        return value

    def reference(found: re.Match[str]) -> str:
        return f'"#/components/schemas/{named(found[1])}"'

    text = re.sub(r'"#/\$defs/([^"]+)"', reference, json.dumps(document))
    made: dict[str, Any] = json.loads(text, object_hook=moved)
    made["components"]["schemas"] = definitions
    if has_keys:
        made["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return made


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
    every = (openai, responses, anthropic, tokens, models, operation, page)
    for routes in every:
        app.include_router(routes.router)
    return app
