"""Qwen3-Coder: `<function=f>`, and each argument as text in `<parameter=a>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_NEXT = re.compile(r"<parameter=([^>\n]+)>\n?|</function>")
_END = "</parameter>"
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
_TEXT_KEYWORDS = {"type", "description", "title", "default", "examples", "enum", "const"}


class Qwen3Coder(ToolCallFormat):
    """Texts are sent as they come, other values when they have ended."""

    is_tagged = True
    separator = "\n"
    trigger = "<tool_call>"
    new_id = staticmethod(grammar.openai_id)

    def parse(self, section: SectionText, functions: Mapping[str, Function]) -> Parsed:
        """See `ToolCallFormat`."""
        text = section.text
        calls: list[ToolCall] = []
        place: int | None = 0
        while place is not None and (head := _FUNCTION.match(text, place)):
            function = functions.get(head[1], Function(head[1]))
            call, place = _call(text, head.end(), function)
            calls.append(call)
        return tagged(section, calls, place)

    def call(self, function: Function) -> Node:
        """See `ToolCallFormat`."""
        parts = []
        for name, schema, is_required in grammar.properties(function):
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
    if function.is_strict and (others := schema.keys() - _TEXT_KEYWORDS - {"$defs"}):
        raise ValueError(
            f'{function.place}.parameters.properties.{name}: keyword "{min(others)}" is not '
            "enforced for texts in this model's form of tool calls"
        )
    return grammar.ANY_TEXT


def _call(text: str, start: int, function: Function) -> tuple[ToolCall, int | None]:
    """Return the call from after its head, and the index after it; None while more may come."""
    declared = function.parameters.get("properties") or {}
    arguments, names = "{", set()
    place = start
    while found := _NEXT.search(text, place):
        name = found[1]
        if name is None:
            return ToolCall(function.name, arguments + "}", True), found.end()
        types = _types(declared.get(name, {"type": "string"}))
        end = text.find(_END, found.end())
        head = ", " * (len(arguments) > 1) + f"{json.dumps(name, ensure_ascii=False)}: "
        is_new = name not in names
        if end < 0:
            if is_new and types == {"string"}:
                begun = _escaped(_certain(text[found.end() :]))
                arguments += f'{head}"{begun}'
            return ToolCall(function.name, arguments, False), None
        if is_new:
            arguments += head + _json(text[found.end() : end].removesuffix("\n"), types)
        names.add(name)
        place = end + len(_END)
    return ToolCall(function.name, arguments, False), None


def _certain(text: str) -> str:
    """Return `text` without what may be the start of its end."""
    for tail in (f"\n{_END}", _END):
        for length in range(min(len(tail), len(text)), 0, -1):
            if text.endswith(tail[:length]):
                return text[:-length]
    return text


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
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if listed is not None:
        return {name for name in _TYPES if any(_is(value, name) for value in listed)}
    alternatives = [_types(each) for key in ("anyOf", "oneOf") for each in schema.get(key, ())]
    return set().union(*alternatives) if all(alternatives) else set()
