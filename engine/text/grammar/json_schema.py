"""Checks of JSON schemas: what is not enforced is refused, with a JSON pointer to it.

llguidance refuses most of the keywords that it does not enforce. It ignores unknown ones and some
formats, and takes options from the schema itself; that is decided here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from llguidance import LLMatcher

from engine.json_reader import parse_json
from engine.text.grammar.regexes import portable
from engine.text.grammar.spec import GrammarTextError, check_literal

MAX_DEPTH = 64  # of schemas inside schemas

# Between two tokens of JSON. A model that may write blanks without end writes nothing else up to
# `max_tokens`; llama.cpp allows as many.
_WHITESPACE = r"[ ]|(\r?\n){1,2}[ \t]{0,20}"

_ENFORCED = {
    *("type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref", "$defs", "definitions"),
    *("properties", "required", "additionalProperties", "patternProperties"),
    *("minProperties", "maxProperties", "items", "prefixItems", "additionalItems"),
    *("minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_ANNOTATIONS = {
    *("title", "description", "default", "example", "examples", "deprecated"),
    *("readOnly", "writeOnly", "$comment", "$schema", "$id", "id", "$anchor"),
}
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6"),
    *("uri", "uuid"),
}
_VALUES = {"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_LITERALS = {"enum", "const", "pattern"}
_MAX_INTEGER = 2**53  # numbers are float64 in llguidance
_WITHOUT_EFFECT = {("uniqueItems", False), ("nullable", False)}
_ALTERNATIVES = {"anyOf", "oneOf"}  # OpenAPI's "discriminator" only helps to distinguish them

# Keywords whose values are schemas, in an object, in a list, or alone.
_SCHEMA_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")


def resolved(root: Any, ref: str) -> Any | None:
    """Return the schema that a JSON pointer into `root` names; None if it is no such pointer."""
    if not ref.startswith("#") or (ref != "#" and not ref.startswith("#/")):
        return None
    value = root
    for part in ref[2:].split("/") if ref != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value if isinstance(value, (Mapping, bool)) else None


def drop_unreachable(root: Any, schemas: Sequence[dict[str, Any]]) -> None:
    """Drop the references of `schemas`, which are all in `root`, to what is not there."""
    bases = {str(schema["$id"]) for schema in schemas if "$id" in schema}
    anchors = {f"#{schema['$anchor']}" for schema in schemas if "$anchor" in schema}
    for schema in schemas:
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            continue
        is_there = resolved(root, unquote(ref)) is not None
        if not is_there and ref not in anchors and ref.partition("#")[0] not in bases:
            del schema["$ref"]


def allow_any_of_exclusive(root: Any, schemas: Iterable[dict[str, Any]]) -> None:
    """Write "anyOf" for "oneOf" where a tag, as pydantic's unions have it, distinguishes objects.

    llguidance does not look for it behind references.
    """
    for schema in schemas:
        alternatives = schema.get("oneOf")
        if "anyOf" in schema or not isinstance(alternatives, list) or not alternatives:
            continue
        tags = [_tags(root, each) for each in alternatives]
        if any(_are_disjoint([each.get(name, set()) for each in tags]) for name in tags[0]):
            schema["anyOf"] = schema.pop("oneOf")


def _tags(root: Any, schema: Any) -> dict[str, set[str]]:
    """Return the texts that members may be which every instance has, all of them objects."""
    if isinstance(schema, Mapping) and isinstance(ref := schema.get("$ref"), str):
        schema = resolved(root, ref)
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return {}
    tags = {}
    for name, inner in schema.get("properties", {}).items():
        if name in schema.get("required", ()) and isinstance(inner, Mapping):
            values = inner.get("enum", [inner.get("const")])
            if isinstance(values, list) and all(isinstance(each, str) for each in values):
                tags[name] = set(values)
    return tags


def _are_disjoint(values: Sequence[set[str]]) -> bool:
    return all(values) and sum(map(len, values)) == len(set().union(*values))


class Subschema(NamedTuple):
    """A schema inside the schema, and the JSON pointer to it."""

    pointer: str
    schema: Any


def prepare_schema(
    text: str, *, strict: bool, whitespace_pattern: str | None = None
) -> dict[str, Any]:
    """Return the schema to compile, with options for llguidance, from JSON `text`.

    Args:
        text: the schema.
        strict, whitespace_pattern: as in `GrammarSpec`.

    Raises:
        GrammarTextError: with a JSON pointer: it is no schema, or nothing finite can match it, or,
            if `strict`, it has something that would not be enforced.
    """
    schema = parse_json(text, "#", GrammarTextError, finite=True)
    if isinstance(schema, bool):
        schema = {} if schema else {"anyOf": []}
    inner = list(subschemas(schema))
    for subschema in inner:
        _check(subschema, strict=strict)
    schemas = [subschema.schema for subschema in inner if isinstance(subschema.schema, dict)]
    if not strict:
        drop_unreachable(schema, schemas)
    allow_any_of_exclusive(schema, schemas)
    if not _Finite(schema).holds(schema):
        raise GrammarTextError("#: no finite document can match: the schema requires itself")
    options = {"lenient": not strict, "coerce_one_of": not strict}
    return {**schema, "x-guidance": {**options, **_whitespace(whitespace_pattern)}}


def _whitespace(pattern: str | None) -> dict[str, Any]:
    if pattern is None:
        return {"whitespace_pattern": _WHITESPACE}
    if not pattern:
        return {"whitespace_flexible": False}
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(portable(pattern)))
    if error:
        raise GrammarTextError(f"whitespace_pattern: is not a valid regular expression: {error}")
    return {"whitespace_pattern": portable(pattern)}


def subschemas(schema: Any) -> Iterator[Subschema]:
    """Yield `schema` and every schema in it.

    Raises:
        GrammarTextError: one is neither an object nor true or false, or they nest too deeply.
    """
    waiting = [(Subschema("#", schema), 0)]
    while waiting:
        subschema, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise GrammarTextError(
                f"{subschema.pointer}: is nested deeper than {MAX_DEPTH} schemas"
            )
        if not isinstance(subschema.schema, (dict, bool)):
            raise GrammarTextError(f"{subschema.pointer}: must be an object or a boolean")
        yield subschema
        if isinstance(subschema.schema, dict):
            waiting += [(inner, depth + 1) for inner in _inner(subschema)]


def _inner(subschema: Subschema) -> Iterator[Subschema]:
    pointer, schema = subschema
    for name in _SCHEMA_OBJECTS:
        if name in schema:
            if not isinstance(schema[name], dict):
                raise GrammarTextError(f"{pointer}/{name}: must be an object")
            for key, value in schema[name].items():
                escaped = key.replace("~", "~0").replace("/", "~1")
                yield Subschema(f"{pointer}/{name}/{escaped}", value)
    for name in _SCHEMA_LISTS:
        if isinstance(schema.get(name), list):
            for index, value in enumerate(schema[name]):
                yield Subschema(f"{pointer}/{name}/{index}", value)
        elif name in schema and name not in _SCHEMAS:
            raise GrammarTextError(f"{pointer}/{name}: must be a list")
    for name in _SCHEMAS:
        if name in schema and not isinstance(schema[name], list):
            yield Subschema(f"{pointer}/{name}", schema[name])


def _check(subschema: Subschema, *, strict: bool) -> None:
    """Refuse what is not enforced; drop it if not `strict`. Rewrite patterns."""
    pointer, schema = subschema
    if isinstance(schema, bool):
        return
    _check_type(schema.get("type", []), pointer)
    literals = {name: schema[name] for name in _LITERALS & schema.keys()}
    try:
        for text in _strings([literals, *schema.get("properties", ())]):
            check_literal(text)
    except GrammarTextError as error:
        raise GrammarTextError(f"{pointer}: {error}") from None
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = portable(schema["pattern"])
    if inner := schema.get("patternProperties"):
        schema["patternProperties"] = {portable(name): value for name, value in inner.items()}
    if not strict:
        _drop_patterns(schema)
    for name, value in list(schema.items()):
        if name == "format" and isinstance(value, str) and value not in _FORMATS:
            reason = f'format "{value}" is not enforced'
        elif name in _VALUES and not _is_exact(value):
            reason = f'keyword "{name}" is not enforced exactly for integers beyond 2**53'
        elif name in _ENFORCED:
            continue
        elif (
            name in _ANNOTATIONS
            or (name.startswith("x-") and name != "x-guidance")
            or (isinstance(value, bool) and (name, value) in _WITHOUT_EFFECT)
            or (name == "discriminator" and not schema.keys().isdisjoint(_ALTERNATIVES))
        ):
            if not name.startswith("$"):  # references may need those
                del schema[name]
            continue
        else:
            reason = f'keyword "{name}" is not enforced'
        if strict:
            raise GrammarTextError(f'{pointer}: {reason}; leave it out, or send "strict": false')
        del schema[name]


def _drop_patterns(schema: dict[str, Any]) -> None:
    """Drop the regular expressions of one schema that llguidance does not know."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not _compiles(pattern):
        del schema["pattern"]
    named = schema.get("patternProperties", {})
    if unknown := [name for name in named if not _compiles(name)]:
        for name in unknown:
            del named[name]
        schema.pop("additionalProperties", None)  # which are the others is not known


def _compiles(pattern: str) -> bool:
    grammar = {"json_schema": {"type": "string", "pattern": pattern}}
    return not LLMatcher.validate_grammar(json.dumps({"grammars": [grammar]}))


def _check_type(value: Any, pointer: str) -> None:
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, str) or each not in _TYPES:
            raise GrammarTextError(f"{pointer}/type: must be of {', '.join(_TYPES)}")


def _is_exact(value: Any) -> bool:
    """Whether no integer in a JSON value is too large for float64."""
    if isinstance(value, (list, dict)):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) <= _MAX_INTEGER


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, with the names of members."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


class _Finite:
    """Whether a finite document can match, as far as references and required values decide."""

    def __init__(self, root: Any) -> None:
        """Find the references of `root` whose targets can end: the least fixed point."""
        targets = {
            ref: resolved(root, ref)
            for _, schema in subschemas(root)
            if isinstance(schema, Mapping) and isinstance(ref := schema.get("$ref"), str)
        }
        # Other references than pointers are left to llguidance.
        self._ending = {ref for ref, target in targets.items() if target is None}
        waiting = targets.keys() - self._ending
        while found := {ref for ref in waiting if self.holds(targets[ref])}:
            self._ending |= found
            waiting -= found

    def holds(self, schema: Any) -> bool:
        """Whether `schema` has an instance, given the references that do."""
        if not isinstance(schema, Mapping):
            return schema is not False
        if "$ref" in schema and schema["$ref"] not in self._ending:
            return False
        if not all(map(self.holds, schema.get("allOf", ()))):
            return False
        for name in ("anyOf", "oneOf"):
            if schema.get(name) and not any(map(self.holds, schema[name])):
                return False
        properties = schema.get("properties", {})
        if schema.get("type") == "object" and isinstance(schema.get("required"), list):
            return all(self.holds(properties.get(str(name), True)) for name in schema["required"])
        if schema.get("type") == "array" and schema.get("minItems") and "prefixItems" not in schema:
            items = schema.get("items", True)
            return self.holds(items) if not isinstance(items, list) else True
        return True
