"""Structural tags: free text with parts of a given structure, and structures alone.

Two forms of requests: vLLM's older one, `structures` and `triggers`, and the one of xgrammar 0.1.22
and later, a tree of `format`, of which the types in `_FIELDS` are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.json_reader import parse_json
from engine.text.grammar.lark_writer import LarkWriter
from engine.text.grammar.spec import GrammarTextError

_MAX_DEPTH = 32

# Of each type the fields that it must have, with their types, and those that it may have.
_FIELDS: Mapping[str, tuple[Mapping[str, type], Mapping[str, type]]] = {
    "any_text": ({}, {"excludes": list}),
    "const_string": ({"value": str}, {}),
    "json_schema": ({"json_schema": object}, {"strict": bool}),
    "optional": ({"content": dict}, {}),
    "or": ({"elements": list}, {}),
    "regex": ({"pattern": str}, {}),
    "sequence": ({"elements": list}, {}),
    "tag": ({"begin": str, "content": dict, "end": str}, {}),
    "tags_with_separator": (
        {"tags": list, "separator": str},
        {"at_least_one": bool, "stop_after_first": bool},
    ),
    "triggered_tags": (
        {"tags": list, "triggers": list},
        {"at_least_one": bool, "stop_after_first": bool},
    ),
}
_KINDS = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}


class _Tag(NamedTuple):
    """`body` is the expression of all after `begin`; `path` names it in errors."""

    begin: str
    body: str
    path: str


class StructuralTags:
    """Writes the rules of one request."""

    def __init__(self, writer: LarkWriter, *, strict: bool) -> None:
        """`strict` as in `GrammarSpec`, unless a schema has a `strict` of its own."""
        self._writer = writer
        self._strict = strict

    def read(self, text: str) -> str:
        """Return the expression of the whole, given as JSON.

        Raises:
            GrammarTextError: it is wrong; the text names the field.
        """
        fields = parse_json(text, "", GrammarTextError)
        if isinstance(fields, Mapping) and "format" in fields:
            return self._node(fields["format"], "format", 0)
        if not isinstance(fields, Mapping) or not (fields.keys() >= {"structures", "triggers"}):
            raise GrammarTextError(
                'must be an object with "structures" and "triggers", or with "format"'
            )
        structures, triggers = fields["structures"], fields["triggers"]
        if not _is_list_of(structures, dict):
            raise GrammarTextError("structures: must be a list of objects")
        tags = [self._structure(each, f"structures/{i}") for i, each in enumerate(structures)]
        return self._triggered(tags, triggers, "", "structures")

    def _structure(self, each: dict[str, Any], path: str) -> _Tag:
        if extra := each.keys() - {"begin", "schema", "end"}:
            raise GrammarTextError(f"{path}/{min(extra)}: unknown field")
        for name in ("begin", "end"):
            if not isinstance(each.setdefault(name, ""), str):
                raise GrammarTextError(f"{path}/{name}: must be a string")
        body = self._schema(each.get("schema", True), f"{path}/schema", strict=self._strict)
        end = [self._writer.text(each["end"])] if each["end"] else []
        return _Tag(each["begin"], " ".join([body, *end]), path)

    def _node(self, node: Any, path: str, depth: int) -> str:
        kind = _checked(node, path, depth)
        depth += 1
        match kind:
            case "any_text":
                return self._writer.free(node.get("excludes", ()))
            case "const_string":
                return self._writer.text(node["value"])
            case "json_schema":
                strict = node.get("strict", self._strict)
                return self._schema(node["json_schema"], f"{path}/json_schema", strict=strict)
            case "regex":
                return self._writer.regex(node["pattern"])
            case "optional":
                return f"({self._node(node['content'], f'{path}/content', depth)})?"
            case "or" | "sequence":
                parts = [
                    self._node(each, f"{path}/elements/{i}", depth)
                    for i, each in enumerate(node["elements"])
                ]
                return f"({(' | ' if kind == 'or' else ' ').join(parts)})"
            case "tag":
                tag = self._tag(node, path, depth)
                return f"{self._writer.text(tag.begin)} {tag.body}"
        tags = [self._tag(each, f"{path}/tags/{i}", depth) for i, each in enumerate(node["tags"])]
        options = {name: node.get(name, False) for name in ("at_least_one", "stop_after_first")}
        if kind == "tags_with_separator":
            return self._separated(tags, node["separator"], **options)
        return self._triggered(tags, node["triggers"], f"{path}/", f"{path}/tags", **options)

    def _tag(self, node: Any, path: str, depth: int) -> _Tag:
        if _checked(node, path, depth) != "tag":
            raise GrammarTextError(f"{path}/type: must be tag")
        end = node["end"]
        if node["content"].get("type") == "any_text" and end:
            _checked(node["content"], f"{path}/content", depth)
            excluded = node["content"].get("excludes", ())
            return _Tag(node["begin"], self._writer.up_to(end, excluded), path)
        content = self._node(node["content"], f"{path}/content", depth + 1)
        return _Tag(node["begin"], f"{content} {self._writer.text(end)}", path)

    def _separated(
        self, tags: Sequence[_Tag], separator: str, *, at_least_one: bool, stop_after_first: bool
    ) -> str:
        alternatives = [f"{self._writer.text(tag.begin)} {tag.body}" for tag in tags]
        one = f"({' | '.join(alternatives)})"
        more = "" if stop_after_first else f" ({self._writer.text(separator)} {one})*"
        return f"({one}{more})" if at_least_one else f"({one}{more})?"

    def _triggered(
        self,
        tags: Sequence[_Tag],
        triggers: Any,
        prefix: str,
        name: str,
        *,
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> str:
        """A trigger is the start of some `begin`: where it appears, one of these must follow."""
        if not _is_texts(triggers):
            raise GrammarTextError(
                f"{prefix}triggers: must be a list of strings, none of them empty"
            )
        parts = []
        for i, trigger in enumerate(triggers):
            begun = [tag for tag in tags if tag.begin.startswith(trigger)]
            if not begun:
                raise GrammarTextError(
                    f"{prefix}triggers/{i}: is not the beginning of any of the {name}"
                )
            rests = [
                f"{self._writer.text(tag.begin.removeprefix(trigger))} {tag.body}" for tag in begun
            ]
            parts.append(f"{self._writer.up_to(trigger, triggers)} ({' | '.join(rests)})")
        for tag in tags:
            if not tag.begin.startswith(tuple(triggers)):
                raise GrammarTextError(f"{tag.path}/begin: must start with one of the triggers")
        one, free = f"({' | '.join(parts)})", self._writer.free(triggers)
        if stop_after_first:
            return one if at_least_one else f"({one} | {free})"
        return f"{one} {one}* {free}" if at_least_one else f"{one}* {free}"

    def _schema(self, schema: Any, path: str, *, strict: bool) -> str:
        try:
            return self._writer.schema(schema, strict=strict)
        except GrammarTextError as error:
            raise GrammarTextError(f"{path}: {error}") from None


def _checked(node: Any, path: str, depth: int) -> str:
    """Return the type of a part of a format.

    Raises:
        GrammarTextError: it is unknown, or a field is wrong.
    """
    if depth > _MAX_DEPTH:
        raise GrammarTextError(f"{path}: is nested deeper than {_MAX_DEPTH} formats")
    kind = str(node.get("type")) if isinstance(node, dict) else ""
    if kind not in _FIELDS:
        raise GrammarTextError(f"{path}/type: must be one of {', '.join(_FIELDS)}")
    needed, possible = _FIELDS[kind]
    if extra := node.keys() - needed.keys() - possible.keys() - {"type"}:
        raise GrammarTextError(f"{path}/{min(extra)}: unknown field")
    for name, wanted in {**needed, **possible}.items():
        if name not in node and name in needed:
            raise GrammarTextError(f"{path}/{name}: is missing")
        if name in node and not isinstance(node[name], wanted):
            raise GrammarTextError(f"{path}/{name}: must be {_KINDS[wanted]}")
        if name == "excludes" and name in node and not _is_texts(node[name]):
            raise GrammarTextError(f"{path}/{name}: must be a list of strings, none of them empty")
        if name in ("elements", "tags") and not node[name]:
            raise GrammarTextError(f"{path}/{name}: must not be empty")
    return kind


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, kind) for x in value)


def _is_texts(value: Any) -> bool:
    return _is_list_of(value, str) and all(value)
