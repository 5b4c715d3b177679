"""gpt-oss: a message whose header names the recipient, ` to=functions.NAME`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from client.gateway.tool_calls import grammar
from client.gateway.tool_calls.format import (
    Function,
    Node,
    Parsed,
    SectionText,
    ToolCall,
    ToolCallFormat,
)
from client.gateway.tool_calls.json_calls import rest_of
from client.gateway.tool_calls.partial_json import skip_space, value_end

_RECIPIENT = re.compile(r" to=(?:functions\.)?([^\s<]+)")


class Harmony(ToolCallFormat):
    """One call per message, and one message per turn."""

    is_tagged = True
    separator = "<|start|>assistant"
    trigger = "<|channel|>commentary to=functions."
    reasoning = grammar.tag(
        "<|channel|>analysis<|message|>", grammar.ANY_TEXT, "<|end|><|start|>assistant"
    )
    answer_begin = "<|channel|>final<|message|>"
    new_id = staticmethod(grammar.openai_id)

    def parse(self, section: SectionText, functions: Mapping[str, Function]) -> Parsed:
        """See `ToolCallFormat`."""
        text, is_closed = section.text, section.is_closed
        recipient = _RECIPIENT.search(section.tag)
        if recipient is None:
            return Parsed(content=text)
        start = skip_space(text, 0)
        if start == len(text):
            return Parsed((ToolCall(recipient[1], "{}", True),) if is_closed else ())
        if text[start] != "{":  # code for a tool of its own
            return Parsed((ToolCall(recipient[1], text[start:], is_closed),))
        end = value_end(text, start, section.notes)
        call = ToolCall(recipient[1], text[start:end], end is not None)
        return Parsed((call,), rest_of(text, end) if is_closed else "")

    def call(self, function: Function) -> Node:
        """See `ToolCallFormat`."""
        head = f"<|channel|>commentary to=functions.{function.name} <|constrain|>json<|message|>"
        return grammar.tag(head, grammar.arguments(function), "<|call|>")
