"""Llama 3: an answer, or what follows `<|python_tag|>`, is `{"name": ..., "parameters": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from client.gateway.tool_parsers import grammar
from client.gateway.tool_parsers.json_calls import read_calls
from client.gateway.tool_parsers.section_text import SectionText, Steps
from client.gateway.tool_parsers.tool_parser import Function, Node, ToolParser

# How a text begins that is not read as calls: neither with an object nor with a list of them.
_NO_CALL = r"[ \t\r\n]*([^ \t\r\n{\[]|\[[ \t\r\n]*[^ \t\r\n{])"


class Llama3Json(ToolParser):
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

    def read(self, text: SectionText, functions: Mapping[str, Function]) -> Steps[None]:
        """See `ToolParser`. Without the tag, only what there is is called."""
        return read_calls(text, lambda name: bool(text.tag) or name in functions)

    def call(self, function: Function) -> Node:
        """See `ToolParser`."""
        head = f'{{"name": {json.dumps(function.name)}, "parameters": '
        return grammar.tag(head, grammar.arguments(function), "}")
