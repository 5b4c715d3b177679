"""Qwen3-Coder: `<function=f>`, and each argument as text in `<parameter=a>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from typing import Any

from client.gateway.tool_calls import grammar
from client.gateway.tool_calls.format import (
    Function,
    Node,
    Parsed,
    SectionText,
    ToolCall,
    ToolCallFormat,
)
from client.gateway.tool_calls.json_calls import tagged
from client.gateway.tool_calls.parameters import ANNOTATIONS, DEFINITIONS, listed

_BEGIN = "<function="
_FUNCTION = re.compile(rf"\s*{_BEGIN}([^>\n]+)>")
_NEXT = re.compile(r"<parameter=([^>\n]+)>\n?|</function>")
_END = "</parameter>"
_FUNCTION_END = "</function>"
# Models forget the tag that ends a value: so may others, where they are at the begin of a line.
_ENDS = re.compile(
    rf"{_END}|(?<=\n)<parameter=(?P<next>[^<>\n]+)>|(?<=\n)(?P<last>{_FUNCTION_END})\s*\Z"
)
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


class Qwen3Coder(ToolCallFormat):
    """Texts are sent as they come, other values when they have ended.

    A value whose end has no tag ends with its line, where another argument begins or the call ends.
    """

    is_tagged = True
    separator = "\n"
    trigger = "<tool_call>"
    late_trigger = _BEGIN
    new_id = staticmethod(grammar.openai_id)

    def parse(self, section: SectionText, functions: Mapping[str, Function]) -> Parsed:
        """See `ToolCallFormat`."""
        whole = section
        if section.tag == _BEGIN:  # what opens a call was forgotten
            whole = section._replace(text=_BEGIN + section.text)
            head = _FUNCTION.match(whole.text)
            if head and head[1] not in functions:
                return Parsed(content=section.text)
        calls: list[ToolCall] = []
        place: int | None = 0
        while place is not None and (head := _FUNCTION.match(whole.text, place)):
            function = functions.get(head[1], Function(head[1]))
            call, place = _call(whole, head.end(), function)
            calls.append(call)
        return tagged(whole if calls else section, calls, place)

    def call(self, function: Function) -> Node:
        """See `ToolCallFormat`."""
        parts = []
        for name, (schema, is_required) in grammar.parameters(function).items():
            begin, end = f"\n<parameter={name}>\n", f"\n{_END}"
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
        raise ValueError(
            f'{function.place}.parameters.properties.{name}: keyword "{min(others)}" is not '
            "enforced for texts in this model's form of tool calls"
        )
    return grammar.ANY_TEXT


def _call(section: SectionText, start: int, function: Function) -> tuple[ToolCall, int | None]:
    """Return the call from after its head, and the index after it; None while more may come."""
    declared = function.declared
    given: dict[str, str] = {}
    place = start
    while found := _NEXT.search(section.text, place):
        name = found[1]
        if name is None:
            return ToolCall(function.name, _object(given) + "}", True), found.end()
        types = _types(declared[name].schema) if name in declared else {"string"}
        value, end = _value(section, found.end(), types, declared.keys() - given.keys() - {name})
        if value:
            given.setdefault(name, value)
        if end is None:
            break
        place = end
    return ToolCall(function.name, _object(given), False), None


def _object(members: Mapping[str, str]) -> str:
    """Return the JSON object of the texts of `members`, without its end."""
    inner = (f"{json.dumps(k, ensure_ascii=False)}: {value}" for k, value in members.items())
    return "{" + ", ".join(inner)


def _value(
    section: SectionText, start: int, types: set[str], others: Set[str]
) -> tuple[str, int | None]:
    """Return what is known of the JSON of an argument, and the index after it, if it has ended.

    Args:
        start: index of its begin.
        types: it is of one of them; only texts are known before their end.
        others: arguments that may follow it.
    """
    text, notes = section.text, section.notes
    whole: tuple[str, int] | None = notes.get(("whole", start))
    if whole is not None:
        return whole
    place, begun = notes.get(start, (start, '"' if types == {"string"} else ""))
    if (end := _end(section, place, others)) is not None:
        whole = _json(text[start : end[0]].removesuffix("\n"), types), end[1]
        notes["whole", start] = whole
        return whole
    certain = _certain(text, place, others)
    if begun:
        begun += _escaped(text[place:certain])
    notes[start] = certain, begun
    return begun, None


def _end(section: SectionText, start: int, others: Set[str]) -> tuple[int, int] | None:
    """Return the index of the first end of a value from `start`, and that of what follows it."""
    for found in _ENDS.finditer(section.text, start):
        if found["last"]:
            return (found.start(), found.start()) if section.is_closed else None
        if found["next"] is None:
            return found.span()
        if found["next"] in others:
            return found.start(), found.start()
    return None


def _certain(text: str, start: int, others: Set[str]) -> int:
    """Return the index of what may begin a value's end, of which there is none from `start`."""
    place = text.rfind("<", start)
    tail = text[place:].rstrip() if place >= 0 else ""
    ends = [_END]
    if text[place - 1 : place] == "\n":
        ends += [_FUNCTION_END, *(f"<parameter={name}>" for name in others)]
    if not tail or not any(end.startswith(tail) for end in ends):
        place = len(text)
    return place - text.endswith("\n", start, place)


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
    return json.dumps(text, ensure_ascii=False)


def _is(value: Any, name: str) -> bool:
    kind = _TYPES.get(name, object)
    return isinstance(value, kind) and (name == "boolean" or not isinstance(value, bool))


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names; none if it does not tell."""
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
