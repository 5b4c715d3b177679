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
_MESSAGE: Node = {  # text without the tokens of headers, in which a call may be begun
    **grammar.ANY_TEXT,
    "excludes": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"],
}


def _message_of(channel: str) -> Node:
    """Return a message after which the turn goes on."""
    head = f"<|channel|>{channel}<|message|>"
    return grammar.tag(head, _MESSAGE, "<|end|><|start|>assistant")


_ANALYSIS = _message_of("analysis")
_BEFORE_ANSWER: Node = {
    "type": "tags_with_separator",
    "tags": [_ANALYSIS, _message_of("commentary")],  # the latter says to the user what comes
    "separator": "",
}


class Harmony(ToolCallFormat):
    """One call per message, and one message per turn."""

    is_tagged = True
    separator = "<|start|>assistant"
    reasoning = grammar.optional(_ANALYSIS)
    answer_begin = "<|channel|>final<|message|>"
    text = grammar.tag(answer_begin, _MESSAGE, "")
    before_text = _BEFORE_ANSWER
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
