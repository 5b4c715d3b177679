"""Calls written as JSON, as Hermes, Qwen, Llama 3 and Mistral do.

They are objects with `name` and `arguments` or `parameters`. Arguments are a part of the text as it
stands. So those of a text that goes on begin with those of the text so far, wherever it is cut.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_BETWEEN = re.compile(r"[\s,;\[\]]*")  # objects; a list of them is as good
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,{}\[\]\"]+(?=[\s,}\]])")
_NESTED = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
_ARGUMENTS = ("arguments", "parameters")


class Call(NamedTuple):
    """A call, or the beginning of one whose name is known.

    Attributes:
        name: of the function.
        arguments: as JSON text, as far as it goes.
        is_complete: nothing more follows.
    """

    name: str
    arguments: str
    is_complete: bool


class Calls(NamedTuple):
    """What a text holds.

    Attributes:
        calls: in order; the last one may be incomplete.
        end: where the text after them begins.
        is_open: the text after them may become a call, or is nothing but what separates calls.
    """

    calls: tuple[Call, ...]
    end: int
    is_open: bool


def read_calls(text: str) -> Calls:
    """Return the calls at the beginning of `text`, which may be cut anywhere."""
    calls: list[Call] = []
    place = 0
    while (start := _end(_BETWEEN, text, place)) < len(text):
        try:
            call, end = _read_object(text, start)
        except _NoCallError:
            return Calls(tuple(calls), place, is_open=False)
        if call is None:
            return Calls(tuple(calls), place, is_open=True)
        calls.append(call)
        if not call.is_complete:
            return Calls(tuple(calls), len(text), is_open=True)
        place = end
    return Calls(tuple(calls), place, is_open=True)


class _NoCallError(Exception):
    """The text is no call."""


class _CutError(Exception):
    """The text ends before what is read."""


def _read_object(text: str, start: int) -> tuple[Call | None, int]:
    """Return the call that begins at `start`, None if its name is not there yet, and its end."""
    name: str | None = None
    arguments: str | None = None
    try:
        place = _expect(text, start, "{")
        while True:
            key, place = _read_string(text, place)
            place = _expect(text, place, ":")
            place = _end(_SPACE, text, place)
            begin, end = place, _value_end(text, place)
            if key == "name":
                name, _ = _read_string(text, place)
            elif key in _ARGUMENTS:
                arguments = _arguments(text[begin:end], is_whole=end is not None)
            if end is None:
                raise _CutError
            place = _end(_SPACE, text, end)
            if place == len(text):
                raise _CutError
            if text[place] == "}":
                break
            place = _expect(text, place, ",")
    except _CutError:
        if name is None:
            return None, start
        return Call(name, arguments or "", is_complete=False), len(text)
    if name is None:
        raise _NoCallError
    return Call(name, "{}" if arguments is None else arguments, is_complete=True), place + 1


def _arguments(value: str, *, is_whole: bool) -> str:
    """Return arguments as JSON text; some models write them into a string."""
    if not value.startswith('"'):
        return value
    return _unquoted(value) if is_whole else ""


def _expect(text: str, place: int, character: str) -> int:
    """Return the place after `character`, which may stand after spaces."""
    place = _end(_SPACE, text, place)
    if place == len(text):
        raise _CutError
    if text[place] != character:
        raise _NoCallError
    return place + 1


def _read_string(text: str, place: int) -> tuple[str, int]:
    place = _end(_SPACE, text, place)
    if place == len(text):
        raise _CutError
    if text[place] != '"':
        raise _NoCallError
    found = _STRING.match(text, place)
    if found is None:
        raise _CutError
    return _unquoted(found[0]), found.end()


def _unquoted(literal: str) -> str:
    try:
        return str(json.loads(literal, strict=False))
    except ValueError:
        raise _NoCallError from None


def _value_end(text: str, place: int) -> int | None:
    """Return where the JSON value at `place` ends; None if the text ends before it."""
    if place == len(text):
        return None
    if text[place] in "{[":
        depth = 0
        for found in _NESTED.finditer(text, place):
            if found[0] in "{[":
                depth += 1
            elif found[0] in "}]":
                depth -= 1
                if depth == 0:
                    return found.end()
        return None
    pattern = _STRING if text[place] == '"' else _SCALAR
    whole = pattern.match(text, place)
    return None if whole is None else whole.end()


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    assert found is not None, "it matches nothing too"
    return found.end()
