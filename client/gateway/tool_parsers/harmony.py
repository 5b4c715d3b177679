"""gpt-oss: a message whose header names the recipient, ` to=functions.NAME`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from client.gateway.tool_parsers import grammar
from client.gateway.tool_parsers.partial_json import value
from client.gateway.tool_parsers.section_text import (
    CallArguments,
    CallEnd,
    CallStart,
    EndOfTextError,
    SectionText,
    Steps,
)
from client.gateway.tool_parsers.tool_parser import Function, Node, ToolParser

_RECIPIENT = re.compile(r" to=(?:functions\.)?([^\s<]+)")
_CODE = re.compile(r".*", re.DOTALL)
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
    "tags": [_ANALYSIS, _message_of("commentary")],  # the latter announces the calls to the user
    "separator": "",
}


class Harmony(ToolParser):
    """One call per message, and one message per turn."""

    is_tagged = True
    separator = "<|start|>assistant"
    reasoning = grammar.optional(_ANALYSIS)
    answer_begin = "<|channel|>final<|message|>"
    text = grammar.tag(answer_begin, _MESSAGE, "")
    before_text = _BEFORE_ANSWER
    new_id = staticmethod(grammar.openai_id)

    def read(self, text: SectionText, functions: Mapping[str, Function]) -> Steps[None]:
        """See `ToolParser`."""
        recipient = _RECIPIENT.search(text.tag)
        if recipient is None:
            return
        try:
            first = yield from text.skip()
        except EndOfTextError:
            if not text.is_closed:
                raise
            first = ""
        yield CallStart(recipient[1])
        if not first:
            yield CallArguments("{}")
        # What is no object is code for a tool of the model's own.
        for piece in value(text) if first == "{" else text.run(_CODE):
            yield None if piece is None else CallArguments(piece)
        if first == "{" or text.is_closed:
            yield CallEnd()
        text.hold()

    def call(self, function: Function) -> Node:
        """See `ToolParser`."""
        head = f"<|channel|>commentary to=functions.{function.name} <|constrain|>json<|message|>"
        return grammar.tag(head, grammar.arguments(function), "<|call|>")
