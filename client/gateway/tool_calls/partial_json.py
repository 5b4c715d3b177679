"""Reads JSON of which the end has not come yet. What it takes for a value is not validated."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
_NESTED = re.compile(r'"(?:[^"\\]++|\\.)*+("?)|[{}\[\]]', re.DOTALL)
_SCALAR = re.compile(r'[^\s,:{}\[\]"]*')
# Whole escapes only; a wrong one stands for its character.
_BODY = re.compile(
    r'"((?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])|\\[^u])*+)', re.DOTALL
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class Value(NamedTuple):
    """A value: its text, and whether that is all of it."""

    text: str
    is_complete: bool


@dataclass
class PartialObject:
    """The members of an object so far.

    Attributes:
        members: by key, in order; of equal keys the first. Only the last may be incomplete.
        end: index after the closing brace, or of the character that cannot be there.
        is_malformed: whether there is such a character.
    """

    members: dict[str, Value] = field(default_factory=dict)
    end: int | None = None
    is_malformed: bool = False


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` that is not whitespace."""
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def value_end(text: str, start: int) -> int | None:
    """Return the index after the value that starts at `start`; None if more of it may come."""
    if text[start] in "{[":
        return _nested_end(text, start)
    if text[start] == '"':
        string = _STRING.match(text, start)
        assert string is not None
        return string.end() if string[1] else None
    scalar = _SCALAR.match(text, start)
    assert scalar is not None
    return scalar.end() if scalar.end() < len(text) else None


def _nested_end(text: str, start: int) -> int | None:
    depth = 0
    for found in _NESTED.finditer(text, start):
        first = found[0][0]
        if first == '"':
            if not found[1]:
                return None
        elif first in "{[":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return found.end()
    return None


def read_object(text: str, start: int) -> PartialObject:
    """Return the members of the object whose opening brace is at `start`."""
    found = PartialObject()
    place = skip_space(text, start + 1)
    while place < len(text) and text[place] == '"':
        end = value_end(text, place)
        if end is None:
            return found
        key = decode_string(text[place:end])
        colon = skip_space(text, end)
        if text[colon : colon + 1] != ":":
            place = colon
            break
        place = skip_space(text, colon + 1)
        if place == len(text):
            return found
        end = value_end(text, place)
        if end == place:
            break
        found.members.setdefault(key, Value(text[place:end], end is not None))
        if end is None:
            return found
        place = skip_space(text, end)
        if text[place : place + 1] != ",":
            break
        place = skip_space(text, place + 1)
    if place < len(text):
        found.is_malformed = text[place] != "}"
        found.end = place + (not found.is_malformed)
    return found


def decode_string(text: str) -> str:
    """Return the string that the JSON `text` is or begins, as far as it is certain."""
    body = _BODY.match(text)
    assert body is not None
    escaped = body[1]
    if text[body.end() :] != '"':  # the other half may come
        escaped = _HIGH_SURROGATE.sub("", escaped)
    decoded = _ESCAPE.sub(_unescaped, escaped)
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, code)
