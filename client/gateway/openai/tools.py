"""Tools of a chat: which may be called, and the grammar for those that must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from client.errors import InvalidRequestError
from client.gateway.errors import from_client, unsupported
from client.gateway.generation import Generation
from client.gateway.tool_parsers import Node, ToolChoice, ToolParser
from client.gateway.tool_parsers.choice import check_num_tools
from client.gateway.tool_parsers.grammar import json_value

_GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def tool_choice_of(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any, parallel_tool_calls: bool | None
) -> ToolChoice:
    """Return which tools may be called, and which must be; the fields are those of a chat.

    Raises:
        ApiError: a field is wrong.
    """
    try:
        return ToolChoice.read(tools, tool_choice, parallel_tool_calls)
    except InvalidRequestError as error:
        raise from_client(error) from None


def refuse_too_many(number: int) -> None:
    """Refuse so many tools, where they are not read as those of a chat yet.

    Raises:
        ApiError: a request may not have them.
    """
    try:
        check_num_tools(number)
    except InvalidRequestError as error:
        raise from_client(error) from None


def with_calls(generation: Generation, choice: ToolChoice, parser: ToolParser) -> Generation:
    """Return the request with a grammar for `choice`, if it needs one.

    Raises:
        ApiError: a function cannot be enforced, or another grammar is asked for too.
    """
    sampling = dict(generation.sampling)
    answer = _json_answer(sampling.get("response_format"))
    try:
        structure = choice.structure(parser, answer)
    except InvalidRequestError as error:
        raise from_client(error) from None
    if structure is None:
        return generation
    for name in _GRAMMARS:
        if name in sampling:
            raise unsupported(name, "is not supported with tools that have to be enforced")
    sampling.pop("response_format", None)
    sampling["structured_outputs"] = {"structural_tag": {"format": structure}}
    names = {**generation.names, **_names(choice)}
    return replace(generation, sampling=sampling, names=names)


def _names(choice: ToolChoice) -> dict[str, str]:
    """Return what the parts of the grammar are called in the request: its functions, in order."""
    tag = r"structured_outputs\.structural_tag"
    parts = {
        rf"{tag}: format/(?:elements/\d+/)*tags/{index}/[^\s:]+": f"{function.param}.parameters"
        for index, function in enumerate(choice.functions.values())
    }
    return {**parts, tag: "tools"}


def _json_answer(response_format: Any) -> Node | None:
    """Return the structure of an answer that calls nothing; None if it is free text."""
    given = response_format or {}
    if given.get("type") == "json_object":
        return json_value({"type": "object"}, strict=True)
    inner = given.get("json_schema")
    if given.get("type") != "json_schema" or not isinstance(inner, dict):
        return None
    return json_value(inner.get("schema", True), strict=inner.get("strict") is not False)
