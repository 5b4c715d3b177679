"""The OpenAPI document: what FastAPI knows of the routes, and what it cannot know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from msgspec import Struct

from client.gateway.errors import is_anthropic
from client.gateway.http.answers import documented_error
from client.gateway.schemas.errors import AnthropicErrorBody, ErrorBody
from client.gateway.security.access import OPEN_PATHS

# The size of a request, its speed, and faults: the same for every route.
_ANYWHERE = (408, 413, 431, 500)
_KEY = "APIKey"


def complete_document(app: FastAPI, *, has_keys: bool) -> None:
    """Let `app` tell all of its statuses and schemas.

    Args:
        app: whose routes tell by `answers.documented` what they answer.
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
        for operation in methods.values():
            yield path, operation


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
