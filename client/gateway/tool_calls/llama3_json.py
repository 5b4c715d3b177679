"""Llama 3: an answer, or what follows `<|python_tag|>`, is `{"name": ..., "parameters": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from client.gateway.tool_calls import grammar
from client.gateway.tool_calls.format import Function, Node, Notes, Parsed, ToolCallFormat
from client.gateway.tool_calls.json_calls import read_calls, rest_of
from client.gateway.tool_calls.partial_json import skip_space


class Llama3Json(ToolCallFormat):
    """Several calls are separated by semicolons, as vLLM's templates ask for."""

    is_tagged = False
    separator = "; "
    trigger = '{"name": "'
    new_id = staticmethod(grammar.openai_id)

    def parse(
        self,
        text: str,
        functions: Mapping[str, Function],
        notes: Notes,
        *,
        tag: str,
        is_closed: bool,
    ) -> Parsed:
        """See `ToolCallFormat`. Without the tag, only what there is is called."""
        start = skip_space(text, 0)
        if start == len(text):
            return Parsed(content=text if is_closed else "")
        calls, end = read_calls(text, notes)
        known = tag or all(call.name in functions for call in calls[:1])
        if not calls or not known:
            is_none = calls or end is not None or is_closed
            return Parsed(content=text if is_none else "")
        return Parsed(calls, rest_of(text, end) if is_closed else "")

    def call(self, function: Function) -> Node:
        """See `ToolCallFormat`."""
        head = f'{{"name": {json.dumps(function.name)}, "parameters": '
        return grammar.tag(head, grammar.arguments(function), "}")
