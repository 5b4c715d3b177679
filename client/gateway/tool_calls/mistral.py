"""Mistral: `[TOOL_CALLS]` and a list of JSON objects, or a name and its arguments."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping

from client.gateway.tool_calls import grammar
from client.gateway.tool_calls.format import (
    Function,
    Node,
    Notes,
    Parsed,
    SectionText,
    ToolCall,
    ToolCallFormat,
)
from client.gateway.tool_calls.json_calls import read_calls, tagged
from client.gateway.tool_calls.partial_json import skip_space, value_end

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")


class Mistral(ToolCallFormat):
    """The list up to tokenizer version 7, since 11 `[TOOL_CALLS]` and `[ARGS]` for each call."""

    is_tagged = True
    separator = ""
    trigger = "[TOOL_CALLS]"

    def parse(self, section: SectionText, functions: Mapping[str, Function]) -> Parsed:
        """See `ToolCallFormat`."""
        text = section.text
        start = skip_space(text, 0)
        if text[start : start + 1] in ("[", "{"):
            return tagged(section, *read_calls(text, section.notes))
        return tagged(section, *_named_calls(text, section.notes))

    def call(self, function: Function) -> Node:
        """See `ToolCallFormat`."""
        heads = [f"{function.name}[ARGS]", function.name]
        objects = grammar.arguments(function)
        old = grammar.tag(f'[{{"name": "{function.name}", "arguments": ', objects, "}]")
        forms = [*(grammar.tag(head, objects, "") for head in heads), old]
        return grammar.tag("[TOOL_CALLS]", grammar.either(forms), "")

    def new_id(self) -> str:
        """Return nine letters and digits: the templates refuse other ids."""
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


def _named_calls(text: str, notes: Notes) -> tuple[tuple[ToolCall, ...], int | None]:
    calls: list[ToolCall] = []
    place = 0
    while head := _HEAD.match(text, place):
        end = value_end(text, head.end(), notes)
        calls.append(ToolCall(head[1], text[head.end() : end], end is not None))
        if end is None:
            return tuple(calls), None
        place = end
    return tuple(calls), place
