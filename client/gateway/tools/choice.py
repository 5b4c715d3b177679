"""`tools` and `tool_choice` of a request: how calls are found, and what grammar forces them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from client.gateway.errors import ApiError
from client.gateway.schemas.chat import ChatRequest
from client.gateway.tools.answer import ToolFormat

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


def tool_format(body: ChatRequest) -> ToolFormat | None:
    """Return how calls are found in the answers; None if the request has no tools, or wants none.

    Raises:
        ApiError: the choice is none of the tools.
    """
    _check(body)
    if not body.tools or body.tool_choice == "none":
        return None
    return ToolFormat(
        frozenset(_functions(body)), _named(body), body.parallel_tool_calls is not False
    )


def forcing_format(body: ChatRequest) -> dict[str, Any] | None:
    """Return the `response_format` that makes the model call a tool; None if it is free not to.

    A function that is named: its arguments. `required`: a list of calls.
    """
    if not body.tools or body.tool_choice in (None, "none", "auto"):
        return None
    functions = _functions(body)
    if (name := _named(body)) is not None:
        function = functions[name]
        return _json_schema(_parameters(function), strict=bool(function.get("strict")))
    place = "#/items/anyOf/{}/properties/arguments"
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": _moved(_parameters(function), place.format(number)),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, (name, function) in enumerate(functions.items())
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if body.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return _json_schema(schema, strict=all(f.get("strict") for f in functions.values()))


def _json_schema(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    named = {"name": "tools", "schema": schema, "strict": strict}
    return {"type": "json_schema", "json_schema": named}


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or _ANY_ARGUMENTS


def _functions(body: ChatRequest) -> dict[str, Mapping[str, Any]]:
    """Return the functions by name, those that are wrong left out: the engine refuses them."""
    functions = (tool.get("function") for tool in body.tools or ())
    return {
        str(function["name"]): function
        for function in functions
        if isinstance(function, dict) and "name" in function
    }


def _named(body: ChatRequest) -> str | None:
    """Return the function that `tool_choice` names, if it names one."""
    if not isinstance(body.tool_choice, dict):
        return None
    function = body.tool_choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _check(body: ChatRequest) -> None:
    if body.tool_choice is None:
        return
    if not body.tools:
        raise ApiError(400, "tool_choice: needs tools", param="tool_choice")
    name = _named(body)
    if name is not None and (
        body.tool_choice != {"type": "function", "function": {"name": name}}
        or name not in _functions(body)
    ):
        raise ApiError(
            400,
            "tool_choice: must be none, auto, required or "
            '{"type": "function", "function": {"name": one of tools}}',
            param="tool_choice",
        )
    if body.tool_choice in ("none", "auto"):
        return
    for other in ("response_format", "structured_outputs"):
        if getattr(body, other) is not None:
            raise ApiError(
                400, f"{other}: not together with a tool_choice that forces a call", param=other
            )


def _moved(schema: Any, place: str) -> Any:
    """Return `schema` for another place in a document: its references point there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: place + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for name, value in schema.items()
    }
