"""Llama in Python's notation: the whole answer is `[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from client.gateway.tool_calls import grammar
from client.gateway.tool_calls.format import (
    Function,
    Node,
    Notes,
    Parsed,
    SectionText,
    ToolCall,
    ToolCallFormat,
)
from client.gateway.tool_calls.json_calls import rest_of
from client.gateway.tool_calls.partial_json import skip_space

_HEAD = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(\s*")
_BETWEEN = re.compile(r"\s*(?:,|\]\s*,?\s*\[)")  # some write a list for each call
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)\s*")
_KEYWORD_BEGUN = re.compile(r"\s*\w*\s*=?\s*\Z")
_BEGUN = re.compile(r"\s*[\w.-]*\s*\Z")
_MARK = re.compile(r"""[][(){},'"]""")
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
_NAMES = {"true": True, "false": False, "null": None}  # some write JSON


class Pythonic(ToolCallFormat):
    """Arguments are sent one by one: what a value is, is known when it has ended."""

    new_id = staticmethod(grammar.openai_id)

    def __init__(self, *, begin: str = "", end: str = "") -> None:
        """`begin` and `end` are the tags around the calls, if there are any."""
        self._begin, self._end = begin, end
        self.is_tagged, self.trigger = bool(begin), begin
        self.separator = "" if begin else ", "

    def parse(self, section: SectionText, functions: Mapping[str, Function]) -> Parsed:
        """See `ToolCallFormat`. Without tags, only a function that there is is called."""
        text, is_closed = section.text, section.is_closed
        start = skip_space(text, 0)
        if start < len(text) and text[start] == "[":
            calls, end = _calls(
                text, start + 1, section.notes, None if self.is_tagged else functions
            )
        else:
            calls, end = [], None if start == len(text) else start
        if calls:
            return Parsed(tuple(calls), rest_of(text, end) if is_closed else "")
        return Parsed(content=text if is_closed or end is not None else "")

    def call(self, function: Function) -> Node:
        """See `ToolCallFormat`."""
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
                grammar.sequence([value, *map(grammar.optional, more[place + 1 :])])
                for place, value in enumerate(others)
            ]
            content = grammar.optional(grammar.either(firsts))
        head, tail = f"{self._begin}[{function.name}(", f")]{self._end}"
        return grammar.tag(head, content, tail)


def _calls(
    text: str, start: int, notes: Notes, functions: Mapping[str, Function] | None
) -> tuple[list[ToolCall], int | None]:
    """Return the calls from `start`, and the index after them; None while more may come."""
    calls: list[ToolCall] = []
    place = start
    while head := _HEAD.match(text, place):
        if functions is not None and head[1] not in functions:
            return calls, place
        call, end = _call(text, head, notes)
        calls += [] if call is None else [call]
        if end is None or call is None or not call.is_complete:
            return calls, end
        between = _BETWEEN.match(text, end)
        if between is None:
            return calls, _after_list(text, end)
        place = between.end()
    return calls, None if _BEGUN.match(text, place) else place


def _after_list(text: str, end: int) -> int | None:
    place = skip_space(text, end)
    return None if place == len(text) else place + (text[place] == "]")


def _call(text: str, head: re.Match[str], notes: Notes) -> tuple[ToolCall | None, int | None]:
    """Return the call and the index after it; no call before its first argument."""
    members: dict[str, str] = {}
    call: ToolCall | None = None
    place = head.end()
    while place < len(text) and text[place] != ")":
        keyword = _KEYWORD.match(text, place)
        if keyword is None:
            is_begun = _KEYWORD_BEGUN.match(text, place)
            return call, None if is_begun else _rest(head, call, place)
        begin = keyword.end()
        end = _value_end(text, begin, notes)
        if end is None:
            return call, None
        if (begin, end) not in notes:
            notes[begin, end] = _json(text[begin:end])
        if (value := notes[begin, end]) is None:
            return call, _rest(head, call, place)
        members.setdefault(keyword[1], value)
        call = _partial(head[1], members)
        place = skip_space(text, end + (text[end] == ","))
    if place == len(text):
        return call, None
    return ToolCall(head[1], _partial(head[1], members).arguments + "}", True), place + 1


def _rest(head: re.Match[str], call: ToolCall | None, place: int) -> int:
    """Return the index of what is no call, from the head on if nothing of it is one."""
    return head.start(1) if call is None else place


def _partial(name: str, members: Mapping[str, str]) -> ToolCall:
    inner = ", ".join(f"{json.dumps(key)}: {value}" for key, value in members.items())
    return ToolCall(name, "{" + inner, False)


def _value_end(text: str, start: int, notes: Notes) -> int | None:
    """Return the index of the comma or bracket after the expression from `start`."""
    place, depth, quote = notes.get(start, (start, 0, ""))
    while True:
        if quote:
            inside = _INSIDE[quote].match(text, place)
            assert inside is not None
            place = inside.end()
            if not text.startswith(quote, place):
                break
            place, quote = place + len(quote), ""
        if (found := _MARK.search(text, place)) is None:
            place = len(text)
            break
        place, mark = found.start(), found[0]
        if mark in "'\"":
            if len(text) < place + 3:  # there may be three of them
                break
            quote = mark * 3 if text.startswith(mark * 3, place) else mark
        elif mark in "([{":
            depth += 1
        elif depth == 0:
            return place
        elif mark in ")]}":
            depth -= 1
        place += len(quote or mark)
    notes[start] = place, depth, quote
    return None


def _json(text: str) -> str | None:
    """Return the JSON of a literal; None if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are none
            parsed = ast.parse(text.strip(), mode="eval")
        written = json.dumps(_value(parsed.body), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    # A pair of surrogates, as JSON escapes it, is one character.
    return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_value(key) if key is not None else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_value, values), strict=True))
    raise ValueError("is no literal")
