"""Qwen3-Coder: `<function=f>`, and each argument as text in `<parameter=a>`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from client.errors import InvalidRequestError
from client.gateway.tool_parsers import grammar
from client.gateway.tool_parsers.parameters import ANNOTATIONS, DEFINITIONS, listed
from client.gateway.tool_parsers.python_literals import json_of_literal
from client.gateway.tool_parsers.section_text import (
    MAX_MEMBERS,
    MAX_NAME,
    CallArguments,
    CallEnd,
    CallStart,
    EndOfTextError,
    Pieces,
    SectionText,
    Steps,
    Waits,
    joined,
    skipped,
)
from client.gateway.tool_parsers.tool_parser import Function, Node, ToolParser

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_SPACE, _TEXT = re.compile(r"\s*"), re.compile(r"[^<]*")
_NAME = re.compile(r"[^>\n]*")
_NAME_IN_VALUE = re.compile(r"<parameter=([^<>\n]+)>")
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
_TEXT_KEYWORDS = {"type", "enum", "const"} | ANNOTATIONS | DEFINITIONS


class Qwen3Coder(ToolParser):
    """Texts are sent as they come, other values when they have ended.

    A value whose end has no tag ends with its line, where another argument begins or the call ends.
    """

    is_tagged = True
    separator = "\n"
    trigger = "<tool_call>"
    late_trigger = _FUNCTION
    new_id = staticmethod(grammar.openai_id)

    def read(self, text: SectionText, functions: Mapping[str, Function]) -> Steps[None]:
        """See `ToolParser`."""
        if text.tag == _FUNCTION:  # what opens a call was forgotten
            name = yield from _name(text)
            if name not in functions:
                return
        else:
            name = yield from _head(text)
        while name:
            yield CallStart(name)
            yield CallArguments("{")
            if not (yield from _members(text, functions.get(name, Function(name)))):
                return
            yield CallArguments("}")
            yield CallEnd()
            name = yield from _head(text)

    def call(self, function: Function) -> Node:
        """See `ToolParser`."""
        parts = []
        for name, (schema, is_required) in grammar.parameters(function).items():
            begin, end = f"\n<parameter={name}>\n", f"\n{_PARAMETER_END}"
            part = grammar.tag(begin, _content(function, name, schema), end)
            parts.append(part if is_required else grammar.optional(part))
        head, tail = f"<tool_call>\n<function={function.name}>", "\n</function>\n</tool_call>"
        return grammar.tag(head, grammar.sequence([*parts, grammar.const("")]), tail)


def _content(function: Function, name: str, schema: Any) -> Node:
    if _types(schema) != {"string"}:
        return grammar.json_value(schema, strict=function.is_strict)
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        return grammar.either([grammar.const(str(choice)) for choice in choices])
    if function.is_strict and (others := schema.keys() - _TEXT_KEYWORDS):
        raise InvalidRequestError(
            f'keyword "{min(others)}" is not enforced for strings in tool calls of this model',
            param=f"{function.param}.parameters.properties.{name}",
        )
    return grammar.ANY_TEXT


def _head(text: SectionText) -> Steps[str]:
    """Read a call up to its first argument; return its name, or "" if it is none."""
    yield from text.skip(_SPACE)
    if not (yield from text.one_of((_FUNCTION,))):
        return ""
    text.take(len(_FUNCTION))
    return (yield from _name(text))


def _name(text: SectionText) -> Steps[str]:
    """Read the rest of a tag; return the name that it has, or "" if it is none."""
    name = yield from text.name(_NAME)
    if (yield from text.peek()) != ">":
        return ""
    text.take(1)
    return name


def _members(text: SectionText, function: Function) -> Steps[bool]:
    """Read the arguments and the end of a call; return whether there are not too many of them."""
    declared = function.declared
    longest = min(max(map(len, declared), default=0), MAX_NAME)
    given: set[str] = set()
    for _ in range(MAX_MEMBERS):
        name = yield from _parameter(text)
        if not name:
            break
        types = _types(declared[name].schema) if name in declared else {"string"}
        is_new = name not in given
        key = f"{', ' if given else ''}{json.dumps(name, ensure_ascii=False)}: "
        given.add(name)
        value = _value(text, longest, lambda name: name in declared and name not in given)
        if not is_new:  # the first counts
            yield from skipped(value)
        elif types != {"string"}:
            yield CallArguments(key + _json((yield from joined(value)), types))
        else:
            yield from _string(key, value)
    else:
        text.hold()
        if (yield from _parameter(text)):
            return False
    text.hold()
    return True


def _string(key: str, value: Pieces) -> Steps[None]:
    yield CallArguments(f'{key}"')
    for piece in value:
        yield None if piece is None else CallArguments(_escaped(piece))
    yield CallArguments('"')


def _parameter(text: SectionText) -> Steps[str]:
    """Read up to the value of the next argument; return its name, or "" at the end of the call."""
    while True:
        yield from text.skip(_TEXT)
        tag = yield from text.one_of((_PARAMETER, _FUNCTION_END))
        text.take(len(tag) or 1)
        if tag == _FUNCTION_END:
            return ""
        if tag and (name := (yield from _name(text))):
            return name


def _value(text: SectionText, longest: int, may_follow: Callable[[str], bool]) -> Pieces:
    """Read a value and the tag that ends it.

    Models forget that tag: so may others end it, where they are at the begin of a line.

    Args:
        text: where it begins.
        longest: characters of the name of an argument.
        may_follow: whether the argument with a name may be next.
    """
    newline, is_at_begin = "", (yield from text.peek()) == "\n"  # of a line
    text.take(int(is_at_begin))
    while True:
        for piece in text.run(_TEXT):
            if piece is None:
                yield None
                continue
            piece, newline, is_at_begin = newline + piece, "", False
            if piece.endswith("\n"):  # before the tag it is none of the value
                piece, newline = piece[:-1], "\n"
            yield piece
        tag = yield from text.one_of((_PARAMETER_END, _FUNCTION_END, _PARAMETER))
        if tag == _PARAMETER_END:
            read = yield from _unless_end(text)
        elif not tag or not (newline or is_at_begin):
            read = text.take(1)
        elif tag == _FUNCTION_END:
            read = yield from _unless_last(text)
        else:
            found = _NAME_IN_VALUE.match((yield from text.peek(len(tag) + longest + 1)))
            read = "" if found and may_follow(found[1]) else text.take(1)
        if not read:
            return
        rest, is_at_begin = newline + read, False
        newline = "\n" if rest.endswith("\n") else ""
        yield rest.removesuffix("\n")


def _unless_end(text: SectionText) -> Waits[str]:
    """Read `</parameter>` with the space after it; return it if it is a part of the value.

    It ends the value where the next argument or the end of the call follows.
    """
    read = text.take(len(_PARAMETER_END)) + (yield from joined(text.run(_SPACE)))
    try:
        return "" if (yield from text.one_of((_PARAMETER, _FUNCTION_END))) else read
    except EndOfTextError:
        return ""


def _unless_last(text: SectionText) -> Waits[str]:
    """Read `</function>` with the space after it; return it if it is a part of the value.

    It ends the value where nothing follows in the section.
    """
    read = text.take(len(_FUNCTION_END)) + (yield from joined(text.run(_SPACE)))
    try:
        yield from text.peek()
    except EndOfTextError:
        if not text.is_closed:
            raise
        text.put_back(read)
        return ""
    return read


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json(text: str, types: set[str]) -> str:
    """Return the JSON of an argument of these types; `text` itself where it is none of them."""
    if types != {"string"}:
        written = text.strip()
        written = written.lower() if written in ("True", "False") else written
        try:
            value = json.loads("null" if written == "None" else written)
            if not types or any(_is(value, name) for name in types):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
        literal = json_of_literal(text) if types & {"array", "object"} else None
        if literal is not None and any(_is(json.loads(literal), name) for name in types):
            return literal
    return json.dumps(text, ensure_ascii=False)


def _is(value: Any, name: str) -> bool:
    kind = _TYPES.get(name, object)
    return isinstance(value, kind) and (name == "boolean" or not isinstance(value, bool))


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names; none if it names no type."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    if isinstance(named, (str, list)):
        return {named} if isinstance(named, str) else set(map(str, named))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return {name for name in _TYPES if any(_is(value, name) for value in values)}
    alternatives = [_types(each) for key in ("anyOf", "oneOf") for each in listed(schema, key)]
    return set().union(*alternatives) if all(alternatives) else set()
