"""Llama in Python's notation: the whole answer is `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from client.gateway.tool_parsers import grammar
from client.gateway.tool_parsers.python_literals import json_of_literal
from client.gateway.tool_parsers.section_text import (
    MAX_MEMBERS,
    CallArguments,
    CallEnd,
    CallStart,
    Pieces,
    SectionText,
    Steps,
    joined,
)
from client.gateway.tool_parsers.tool_parser import Function, Node, ToolParser

_SPACE = re.compile(r"\s*")
_FUNCTION = re.compile(r"[\w.-]*")
_KEYWORD = re.compile(r"\w*")
_MARK = re.compile(r"""[^][(){},'"]*+""")
# The inside of strings by what opens them: what is certainly not their end, escapes as a whole.
_INSIDE = {
    quote: re.compile(rf"(?:[^{quote[0]}\\]++|\\.{others})*+", re.DOTALL)
    for quote, others in {
        "'": "",
        '"': "",
        "'''": "|'(?='?[^'])",
        '"""': '|"(?="?[^"])',
    }.items()
}


class Pythonic(ToolParser):
    """Arguments are sent one by one: what a value is, is known when it has ended."""

    new_id = staticmethod(grammar.openai_id)

    def __init__(self, *, begin: str = "", end: str = "") -> None:
        """`begin` and `end` are the tags around the calls, if there are any."""
        self._begin, self._end = begin, end
        self.is_tagged, self.trigger = bool(begin), begin
        self.separator = "" if begin else ", "

    def read(self, text: SectionText, functions: Mapping[str, Function]) -> Steps[None]:
        """See `ToolParser`. Without tags, only a function that there is is called."""
        if (yield from text.skip()) != "[":
            return
        text.take(1)
        yield from text.skip(_SPACE)
        while name := (yield from _head(text)):
            if not self.is_tagged and name not in functions:
                return
            if not (yield from _call(text, name)) or not (yield from _goes_on(text)):
                return
            yield from text.skip(_SPACE)
            text.hold()

    def call(self, function: Function) -> Node:
        """See `ToolParser`."""
        strict = function.is_strict
        needed: list[Node] = []
        others: list[Node] = []
        for name, (schema, is_required) in grammar.parameters(function).items():
            value = grammar.tag(f"{name}=", grammar.json_value(schema, strict=strict), "")
            (needed if is_required else others).append(value)
        parts = [part for value in needed for part in (grammar.const(", "), value)][1:]
        more = [grammar.tag(", ", value, "") for value in others]
        if needed or not others:
            content = grammar.sequence([*parts, *map(grammar.optional, more), grammar.const("")])
        else:  # whichever of them is the first
            firsts = [
                grammar.sequence([value, *map(grammar.optional, more[index + 1 :])])
                for index, value in enumerate(others)
            ]
            content = grammar.optional(grammar.either(firsts))
        head, tail = f"{self._begin}[{function.name}(", f")]{self._end}"
        return grammar.tag(head, content, tail)


def _head(text: SectionText) -> Steps[str]:
    """Read a call up to its first argument; return its name, or "" if it is none."""
    first = yield from text.peek()
    name = yield from text.name(_FUNCTION)
    if not (first.isalpha() and first.isascii()) and first != "_":
        return ""
    if (yield from text.skip(_SPACE)) != "(":
        return ""
    text.take(1)
    return name


def _goes_on(text: SectionText) -> Steps[bool]:
    """Read what is between two calls; return whether it is that.

    Some models write a list for each call.
    """
    text.hold()
    mark = yield from text.skip(_SPACE)
    text.hold()
    if mark in ",]":
        text.take(1)
    if mark != "]":
        return mark == ","
    text.hold()
    if (yield from text.skip(_SPACE)) == ",":
        text.take(1)
    is_list = (yield from text.skip(_SPACE)) == "["
    if is_list:
        text.take(1)
    return is_list


def _call(text: SectionText, name: str) -> Steps[bool]:
    """Read the arguments; return whether they are complete. No call begins before the first."""
    given: set[str] = set()
    for _ in range(MAX_MEMBERS):
        if (yield from text.skip(_SPACE)) == ")":
            break
        if given:  # it holds the head otherwise
            text.hold()
        key = yield from _keyword(text)
        value = json_of_literal((yield from joined(_value(text)))) if key else None
        if value is None:
            return False
        if given:
            text.drop()
        else:
            yield CallStart(name)
        if key not in given:
            yield CallArguments(f"{', ' if given else '{'}{json.dumps(key)}: {value}")
        given.add(key)
        if (yield from text.peek()) == ",":
            text.take(1)
    if (yield from text.skip(_SPACE)) != ")":
        text.hold()
        return False
    text.take(1)
    if not given:
        yield CallStart(name)
    yield CallArguments("}" if given else "{}")
    yield CallEnd()
    return True


def _keyword(text: SectionText) -> Steps[str]:
    """Read the name of an argument and `=`; return it, or "" if it is none."""
    first = yield from text.peek()
    name = yield from text.name(_KEYWORD)
    if not (first.isalpha() and first.isascii()) and first != "_":
        return ""
    yield from text.skip(_SPACE)
    sign = yield from text.peek(2)
    if sign[0] != "=" or sign == "==":
        return ""
    text.take(1)
    return name


def _value(text: SectionText) -> Pieces:
    """Read an expression, up to the comma or bracket after it."""
    depth = 0
    while True:
        yield from text.run(_MARK)
        mark = yield from text.peek()
        if mark in "'\"":
            yield from _string(text)
            continue
        if depth == 0 and mark in ",)]}":
            return
        depth += (mark in "([{") - (mark in ")]}")
        yield text.take(1)


def _string(text: SectionText) -> Pieces:
    quote = yield from text.peek(3)
    quote = quote if quote == quote[0] * 3 else quote[0]
    yield text.take(len(quote))
    while True:
        found = text.match(_INSIDE[quote])
        assert found is not None
        if found[0]:
            yield text.take(len(found[0]))
        if text.starts_with(quote):
            break
        yield from text.more()
    yield text.take(len(quote))
