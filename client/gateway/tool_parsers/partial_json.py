"""Reads JSON of which the end has not come yet. What it takes for a value is not validated."""

from __future__ import annotations

import re

from client.gateway.tool_parsers.section_text import EndOfTextError, Pieces, SectionText

_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
_OUTSIDE = re.compile(r'[^"{}\[\]]*+(["{}\[\]]?)')
_SCALAR = re.compile(r'[^\s,:{}\[\]"]*')
# Whole escapes only; a wrong one stands for its character.
_BODY = re.compile(
    r'((?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])|\\[^u])*+)("?)', re.DOTALL
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def value(text: SectionText) -> Pieces:
    """Read the value that begins here.

    Raises:
        EndOfTextError: the section has ended before it has.
    """
    if (yield from text.peek()) in '{["':
        yield from _nested(text)
    else:
        yield from text.run(_SCALAR)
        yield from text.peek()  # by which it is known to have ended


def string(text: SectionText) -> Pieces:
    """Read the string whose quote is next, decoded.

    Raises:
        EndOfTextError: as above.
    """
    text.take(1)
    half = ""  # of a pair of surrogates
    while True:
        found = text.match(_BODY)
        assert found is not None
        body, end = found[1], found[2]
        text.take(len(found[0]))
        decoded = half + _ESCAPE.sub(_unescaped, body)
        is_half = not end and "\ud800" <= decoded[-1:] <= "\udbff"
        half, decoded = (decoded[-1], decoded[:-1]) if is_half else ("", decoded)
        if decoded:
            yield decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if end:
            return
        yield from text.more()


def _nested(text: SectionText) -> Pieces:
    depth, in_string = 0, False
    pieces: list[str] = []  # of what is there
    while True:
        found = text.match(_IN_STRING if in_string else _OUTSIDE)
        assert found is not None
        pieces.append(text.take(len(found[0])))
        mark = found[1]
        if mark == '"':
            in_string = not in_string
        elif mark:
            depth += 1 if mark in "{[" else -1
        if mark and not depth and not in_string:
            yield "".join(pieces)
            return
        if not mark:
            if text.has_ended:
                yield "".join([*pieces, text.take_all()])  # with an escape that was cut off
                raise EndOfTextError
            if any(pieces):
                yield "".join(pieces)
            pieces = []
            yield None


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, code)
