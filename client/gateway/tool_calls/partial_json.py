"""Reads JSON of which the end has not come yet. What it takes for a value is not validated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from client.gateway.tool_calls.format import Notes

_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
_OUTSIDE = re.compile(r'[^"{}\[\]]*+(["{}\[\]]?)')
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
    """An object of which the end may not have come yet.

    Attributes:
        end: index after the closing brace, or of the character that cannot be there; known when
            `members` have been read.
        is_malformed: whether there is such a character.
    """

    end: int | None = None
    is_malformed: bool = False

    def members(self, text: str, start: int, notes: Notes) -> Iterator[tuple[str, Value]]:
        """Yield key and value of what there is of the object whose opening brace is at `start`."""
        place = skip_space(text, start + 1)
        while place < len(text) and text[place] == '"':
            end = value_end(text, place, notes)
            if end is None:
                return
            key = decode_string(text[place:end])
            colon = skip_space(text, end)
            if text[colon : colon + 1] != ":":
                place = colon
                break
            place = skip_space(text, colon + 1)
            if place == len(text):
                return
            end = value_end(text, place, notes)
            if end == place:
                break
            yield key, Value(text[place:end], end is not None)
            if end is None:
                return
            place = skip_space(text, end)
            if text[place : place + 1] != ",":
                break
            place = skip_space(text, place + 1)
        if place < len(text):
            self.is_malformed = text[place] != "}"
            self.end = place + (not self.is_malformed)


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` that is not whitespace."""
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def value_end(text: str, start: int, notes: Notes) -> int | None:
    """Return the index after the value that starts at `start`; None if more of it may come.

    Args:
        notes: how far it has been read, and how deep in brackets and in a string that was.
    """
    if text[start] in '{["':
        return _nested_end(text, start, notes)
    scalar = _SCALAR.match(text, start)
    assert scalar is not None
    return scalar.end() if scalar.end() < len(text) else None


def _nested_end(text: str, start: int, notes: Notes) -> int | None:
    place, depth, in_string = notes.get(start, (start, 0, False))
    while place == start or depth or in_string:
        found = (_IN_STRING if in_string else _OUTSIDE).match(text, place)
        assert found is not None
        place, mark = found.end(), found[1]
        if not mark:
            break
        if mark == '"':
            in_string = not in_string
        else:
            depth += 1 if mark in "{[" else -1
    notes[start] = place, depth, in_string
    return None if depth or in_string else place


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
