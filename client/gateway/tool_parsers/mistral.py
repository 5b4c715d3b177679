"""Mistral: `[TOOL_CALLS]` and a list of JSON objects, or a name and its arguments."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping

from client.gateway.tool_parsers import grammar
from client.gateway.tool_parsers.json_calls import read_calls
from client.gateway.tool_parsers.partial_json import value
from client.gateway.tool_parsers.section_text import (
    CallArguments,
    CallEnd,
    CallStart,
    SectionText,
    Steps,
    skipped,
)
from client.gateway.tool_parsers.tool_parser import Function, Node, ToolParser

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
_SPACE, _NAME, _ID = re.compile(r"\s*"), re.compile(r"[\w.-]*"), re.compile(r"\w*")
_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"


class Mistral(ToolParser):
    """The list up to tokenizer version 7, since 11 `[TOOL_CALLS]` and `[ARGS]` for each call."""

    is_tagged = True
    separator = ""
    trigger = "[TOOL_CALLS]"

    def read(self, text: SectionText, functions: Mapping[str, Function]) -> Steps[None]:
        """See `ToolParser`."""
        if (yield from text.skip()) in "[{":
            yield from read_calls(text)
            return
        while name := (yield from _name(text)):
            yield CallStart(name)
            for piece in value(text):
                yield None if piece is None else CallArguments(piece)
            yield CallEnd()
            text.hold()

    def call(self, function: Function) -> Node:
        """See `ToolParser`."""
        heads = [f"{function.name}[ARGS]", function.name]
        objects = grammar.arguments(function)
        old = grammar.tag(f'[{{"name": "{function.name}", "arguments": ', objects, "}]")
        alternatives = [*(grammar.tag(head, objects, "") for head in heads), old]
        return grammar.tag("[TOOL_CALLS]", grammar.either(alternatives), "")

    def new_id(self) -> str:
        """Return nine letters and digits: the templates refuse other ids."""
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


def _name(text: SectionText) -> Steps[str]:
    """Read what is before the arguments of a call; return its name, or "" if it is none."""
    yield from text.skip(_SPACE)
    name = yield from text.name(_NAME)
    if (yield from text.one_of((_CALL_ID, _ARGS))) == _CALL_ID:
        text.take(len(_CALL_ID))
        yield from skipped(text.run(_ID))
    if (yield from text.one_of((_ARGS,))):
        text.take(len(_ARGS))
    return name if (yield from text.skip(_SPACE)) == "{" else ""
