"""Builds the structural tags (xgrammar's) that enforce the form of tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from client.errors import InvalidRequestError
from client.gateway.tool_parsers.parameters import Parameter, parameters_of
from client.gateway.tool_parsers.tool_parser import Function, Node

ANY_TEXT: Node = {"type": "any_text"}


def openai_id() -> str:
    """Return an id for a call in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def const(text: str) -> Node:
    """Return the structure of this very text; tags that are tokens are these tokens."""
    return {"type": "const_string", "value": text}


def sequence(parts: Sequence[Node]) -> Node:
    """Return one after another."""
    return {"type": "sequence", "elements": list(parts)}


def either(parts: Sequence[Node]) -> Node:
    """Return one of several."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Node) -> Node:
    """Return it, or nothing."""
    return {"type": "optional", "content": part}


def tag(begin: str, content: Node, end: str) -> Node:
    """Return `content` between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def begun_at(text: str, part: Node) -> Node:
    """Return a tag that begins with `text`, which is in what it begins with."""
    begin = str(part["begin"])
    return {**part, "begin": begin[begin.index(text) :]}


def json_value(schema: Any, *, strict: bool) -> Node:
    """Return JSON of a schema; if `strict`, what is not enforced is refused by the server."""
    return {"type": "json_schema", "json_schema": schema, "strict": strict}


def arguments(function: Function) -> Node:
    """Return the JSON object of the arguments."""
    schema = {"type": "object", **function.parameters}
    return json_value(schema, strict=function.is_strict)


def parameters(function: Function) -> dict[str, Parameter]:
    """Return the arguments by name, the required ones first.

    Raises:
        InvalidRequestError: the function is strict, and its schema cannot be enforced one by one.
    """
    try:
        return parameters_of(function.parameters, strict=function.is_strict)
    except ValueError as error:
        raise InvalidRequestError(str(error), param=f"{function.param}.parameters") from None


def calls(parts: Sequence[Node], separator: str, *, parallel: bool) -> Node:
    """Return at least one call, and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": list(parts),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def free_text(parts: Sequence[Node], triggers: Sequence[str], *, parallel: bool) -> Node:
    """Return text in which each call that is begun is one of `parts`."""
    return {
        "type": "triggered_tags",
        "triggers": list(triggers),
        "tags": list(parts),
        "stop_after_first": not parallel,
    }
