"""Answers of the routes: as they are sent, and as the OpenAPI document has them."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import Response

from client.gateway.schemas.errors import ErrorBody

# What a request for work may be refused with, whichever route it is for.
REFUSALS = (400, 404, 429, 503)
_JSON = "application/json"


class JsonAnswer(Response):
    """A struct as JSON."""

    media_type = _JSON

    def render(self, content: Struct) -> bytes:
        """Return the body."""
        return msgspec.json.encode(content)


def documented(
    whole: type[Struct],
    *events: type[Struct],
    errors: Iterable[int] = (),
    error: type[Struct] = ErrorBody,
) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of a route's answers, FastAPI's `responses`.

    The schemas have their definitions in them, which `document` then puts where all have theirs.

    Args:
        whole: the body of an answer.
        events: what the data of a stream's events may be, if there are streams.
        errors: statuses of errors.
        error: the body of one. OpenAI's streams end with `[DONE]`, others do not.
    """
    content = {_JSON: {"schema": _schema(whole)}}
    if events:
        piece = {"contentMediaType": _JSON, "contentSchema": _schema(*events, error)}
        end = [{"const": "[DONE]"}] if error is ErrorBody else []
        data = {"type": "string", "anyOf": [piece, *end]}
        item = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        content["text/event-stream"] = {"itemSchema": item}
    good = {"description": "The answer", "content": content}
    return {200: good, **{status: documented_error(status, error) for status in errors}}


def documented_error(status: int, error: type[Struct]) -> dict[str, Any]:
    """Return the documentation of an error with this status and body."""
    made: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": {_JSON: {"schema": _schema(error)}},
    }
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        header = {"description": "Seconds after which it may go well", "schema": {"type": "string"}}
        made["headers"] = {"retry-after": header}
    return made


def _schema(*kinds: Any) -> dict[str, Any]:
    """Return the JSON schema of any of `kinds`, with its definitions."""
    schemas, definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for each in definitions.values():
        _require_all_that_is_sent(each)
    whole = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {**whole, "$defs": definitions}


def _require_all_that_is_sent(definition: dict[str, Any]) -> None:
    """Let fields with a default be required: for msgspec they are not, as it also reads bodies."""
    required = definition.get("required", ())
    properties = definition.get("properties", {})
    definition["required"] = [
        name for name, schema in properties.items() if name in required or "default" in schema
    ]
    for schema in properties.values():
        schema.pop("default", None)
