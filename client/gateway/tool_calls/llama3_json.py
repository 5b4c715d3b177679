"""Llama 3: an answer, or what follows `<|python_tag|>`, is `{"name": ..., "parameters": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from client.gateway.tool_calls import grammar
from client.gateway.tool_calls.format import Function, Node, Parsed, SectionText, ToolCallFormat
from client.gateway.tool_calls.json_calls import read_calls, rest_of
from client.gateway.tool_calls.partial_json import skip_space

# How a text begins that is not read as calls: neither with an object nor with a list of them.
_NO_CALL = r"[ \t\r\n]*([^ \t\r\n{\[]|\[[ \t\r\n]*[^ \t\r\n{])"


class Llama3Json(ToolCallFormat):
    """Several calls are separated by semicolons, as vLLM's templates ask for."""

    is_tagged = False
    separator = "; "
    text = grammar.optional(
        grammar.sequence(
            [
                {"type": "regex", "pattern": _NO_CALL},
                {**grammar.ANY_TEXT, "excludes": ["<|python_tag|>"]},
            ]
        )
    )
    new_id = staticmethod(grammar.openai_id)

    def parse(self, section: SectionText, functions: Mapping[str, Function]) -> Parsed:
        """See `ToolCallFormat`. Without the tag, only what there is is called."""
        text, is_closed = section.text, section.is_closed
        start = skip_space(text, 0)
        if start == len(text):
            return Parsed(content=text if is_closed else "")
        calls, end = read_calls(text, section.notes)
        known = section.tag or all(call.name in functions for call in calls[:1])
        if not calls or not known:
            is_none = calls or end is not None or is_closed
            return Parsed(content=text if is_none else "")
        return Parsed(calls, rest_of(text, end) if is_closed else "")

    def call(self, function: Function) -> Node:
        """See `ToolCallFormat`."""
        head = f'{{"name": {json.dumps(function.name)}, "parameters": '
        return grammar.tag(head, grammar.arguments(function), "}")
