"""Calls as JSON objects, `{"name": ..., "arguments": {...}}`: what several families write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from client.gateway.tool_calls.format import Notes, Parsed, SectionText, ToolCall
from client.gateway.tool_calls.partial_json import (
    PartialObject,
    Value,
    decode_string,
    skip_space,
)

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")
_EMPTY = Value("{}", True)
_BETWEEN = re.compile(r"[\s,;]*")


class JsonCalls(NamedTuple):
    """The calls at the start of a text.

    Attributes:
        calls: in order.
        end: index after them; None if more of them may come.
    """

    calls: tuple[ToolCall, ...]
    end: int | None


def read_calls(text: str, notes: Notes) -> JsonCalls:
    """Read one object, several one after another, or a list of them."""
    calls: list[ToolCall] = []
    place = skip_space(text, 0)
    if text[place : place + 1] == "[":
        place = skip_space(text, place + 1)
    while place < len(text):
        if text[place] != "{":
            return JsonCalls(tuple(calls), place)
        call, end = read_call(text, place, notes)
        calls += [] if call is None else [call]
        if end is None or call is None or not call.is_complete:
            return JsonCalls(tuple(calls), end)
        between = _BETWEEN.match(text, end)
        assert between is not None
        place = between.end()
    return JsonCalls(tuple(calls), None)


def read_call(text: str, start: int, notes: Notes) -> tuple[ToolCall | None, int | None]:
    """Read the object at `start`; return the call, if it is one, and the index after the object.

    A call is one as soon as its name and the start of its arguments are there; the index is None
    while more may come.
    """
    found = PartialObject()
    name: Value | None = None
    given: Value | None = None
    for key, value in found.members(text, start, notes):
        if key == "name":  # of equal keys the first
            name = name or value
        elif key in _ARGUMENTS:
            given = given or value
        elif key not in _OTHERS and (name is None or given is None):
            return None, start
    undecided = None if found.end is None else start
    if name is None or (given is None and (found.end is None or found.is_malformed)):
        return None, undecided
    if name.text[0] != '"':
        return None, start
    if not name.is_complete:
        return None, undecided
    function = decode_string(name.text)
    arguments = _EMPTY if given is None else _arguments(given)
    if arguments is None or not function:
        return None, start
    if not arguments.text:
        return None, undecided
    return ToolCall(function, *arguments), found.end


def _arguments(given: Value) -> Value | None:
    """Return the text of an object; some models write it into a string. None if it is neither."""
    if given.text[0] == "{":
        return given
    if given.text[0] == '"':
        decoded = decode_string(given.text)
        return Value(decoded, given.is_complete) if decoded[:1] in ("", "{") else None
    if "null".startswith(given.text):
        return _EMPTY if given.text == "null" and given.is_complete else Value("", False)
    return None


def tagged(section: SectionText, calls: Sequence[ToolCall], end: int | None) -> Parsed:
    """Return what a section between tags is: calls up to `end`; without any it is content."""
    text = section.text
    rest = rest_of(text, end) if calls else text
    return Parsed(tuple(calls), rest if section.is_closed else "")


def rest_of(text: str, end: int | None) -> str:
    """Return what follows the calls, or "" if that is no more than punctuation of them."""
    rest = "" if end is None else text[end:]
    return rest if rest.strip(" \t\r\n,;}]") else ""
