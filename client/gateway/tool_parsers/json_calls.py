"""Calls as JSON objects, `{"name": ..., "arguments": {...}}`: what several families write."""

from __future__ import annotations

import re
from collections.abc import Callable

from client.gateway.tool_parsers.partial_json import string, value
from client.gateway.tool_parsers.section_text import (
    MAX_MEMBERS,
    CallArguments,
    CallEnd,
    CallStart,
    Pieces,
    SectionText,
    Steps,
    joined,
    skipped,
)

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")
_BETWEEN = re.compile(r"[\s,;]*")


class _NoCallError(Exception):
    """An object is no call."""


def _any(_: str) -> bool:
    return True


def read_calls(text: SectionText, may_be_first: Callable[[str], bool] = _any) -> Steps[None]:
    """Read one object, several one after another, or a list of them.

    Args:
        text: where they begin.
        may_be_first: whether the first may be of a function with this name.
    """
    if (yield from text.skip()) == "[":
        text.take(1)
        yield from text.skip()
    may_be = may_be_first
    while (yield from text.peek()) == "{":
        try:
            yield from _call(text, may_be)
        except _NoCallError:
            return
        may_be = _any
        text.hold()
        yield from text.skip(_BETWEEN)
        text.hold()


def _call(text: SectionText, may_be: Callable[[str], bool]) -> Steps[None]:
    """Read an object; the call begins with its name and the begin of its arguments.

    Where a call is complete, a character that cannot be there ends the object.

    Raises:
        _NoCallError: it is something else.
    """
    name, is_given = "", False
    early: list[str] = []  # arguments that come before the name
    text.take(1)
    yield from text.skip()
    for _ in range(MAX_MEMBERS):
        if (yield from text.peek()) != '"':
            break
        key = yield from joined(string(text))
        if (yield from text.skip()) != ":":
            break
        text.take(1)
        first = yield from text.skip()
        if key == "name" and not name:  # of equal keys the first
            name = (yield from joined(string(text))) if first == '"' else ""
            if not name or not may_be(name):
                raise _NoCallError
            if is_given:
                yield from _whole(name, "".join(early))
        elif key in _ARGUMENTS and not is_given:
            is_given = True
            yield from _arguments(text, name, early)
        elif key not in ("name", *_ARGUMENTS, *_OTHERS) and not (name and is_given):
            raise _NoCallError
        elif first in ",:}]":
            break
        else:
            yield from skipped(value(text))
        if (yield from text.skip()) != ",":
            break
        text.take(1)
        yield from text.skip()
    yield from _ended(text, name, is_given=is_given)


def _ended(text: SectionText, name: str, *, is_given: bool) -> Steps[None]:
    is_whole = (yield from text.peek()) == "}"
    if is_whole:
        text.take(1)
    if is_whole and name and not is_given:
        yield from _whole(name, "{}")
    elif not (name and is_given):
        raise _NoCallError


def _whole(name: str, arguments: str) -> Steps[None]:
    yield CallStart(name)
    yield CallArguments(arguments)
    yield CallEnd()


def _arguments(text: SectionText, name: str, early: list[str]) -> Steps[None]:
    """Read the arguments; without a `name` they are added to `early`."""
    has_begun = False
    for piece in _object(text):
        if piece is None:
            yield None
        elif not name:
            early.append(piece)
        else:
            if not has_begun:
                yield CallStart(name)
            has_begun = True
            yield CallArguments(piece)
    if has_begun:
        yield CallEnd()


def _object(text: SectionText) -> Pieces:
    """Read the text of an object; some models write it into a string, or null for none.

    Raises:
        _NoCallError: it is none of these.
    """
    first = yield from text.peek()
    if first == "{":
        yield from value(text)
    elif first == '"':
        is_begun = False
        for piece in string(text):
            if piece is not None and not is_begun:
                if piece[0] != "{":
                    raise _NoCallError
                is_begun = True
            yield piece
        if not is_begun:
            raise _NoCallError
    elif first != "n" or (yield from joined(value(text))) != "null":
        raise _NoCallError
    else:
        yield "{}"
