"""Hermes, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from client.gateway.tool_parsers import grammar
from client.gateway.tool_parsers.json_calls import read_calls
from client.gateway.tool_parsers.section_text import SectionText, Steps
from client.gateway.tool_parsers.tool_parser import Function, Node, ToolParser


class Hermes(ToolParser):
    """One call between tags; several are tolerated."""

    is_tagged = True
    separator = "\n"
    trigger = "<tool_call>"
    new_id = staticmethod(grammar.openai_id)

    def read(self, text: SectionText, functions: Mapping[str, Function]) -> Steps[None]:
        """See `ToolParser`."""
        return read_calls(text)

    def call(self, function: Function) -> Node:
        """See `ToolParser`."""
        head = f'<tool_call>\n{{"name": {json.dumps(function.name)}, "arguments": '
        return grammar.tag(head, grammar.arguments(function), "}\n</tool_call>")
