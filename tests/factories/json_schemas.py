"""Three hundred JSON schemas that cover every keyword that is enforced, by family."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

Schema = dict[str, Any]

_INTEGER, _STRING, _SHORT = (
    {"type": "integer"},
    {"type": "string"},
    {"type": "string", "maxLength": 5},
)
_BOOLEAN, _NULL = {"type": "boolean"}, {"type": "null"}


def _closed(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    required = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def _types() -> list[Schema]:
    kinds = ["integer", "number", "string", "boolean", "null", "array", "object"]
    some = [{"type": kind} for kind in kinds]
    pairs = [{"type": list(pair)} for pair in combinations(kinds[:5], 2)]
    return [*some, *pairs, {"type": kinds[2:]}, {}, {"title": "x", "description": "y"}]


def _numbers() -> list[Schema]:
    bounds = [(0, 5), (-7, 12), (1, 1), (99, 101), (-250, -3), (0, 1_000_000), (-1, 1000)]
    closed = [
        {"type": kind, "minimum": low, "maximum": high}
        for kind, (low, high) in product(("integer", "number"), bounds)
    ]
    opened = [
        {"type": kind, "exclusiveMinimum": low, "exclusiveMaximum": high + 2}
        for kind, (low, high) in product(("integer", "number"), bounds)
    ]
    half = [
        {"type": kind, keyword: value}
        for kind, keyword, value in product(
            ("integer", "number"),
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
            (-15, 0, 37),
        )
    ]
    fractions = [
        {"type": "number", "minimum": 0.25, "maximum": 0.75},
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.125},
        {"type": "number", "exclusiveMinimum": 0.001},
        {"minimum": 3, "maximum": 8},
    ]
    multiples = [{"type": "integer", "multipleOf": n} for n in (1, 2, 3, 7, 10, 25, 100)]
    multiples += [{"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 40}]
    return closed + opened + half + fractions + multiples


def _strings() -> list[Schema]:
    lengths = [
        {"type": "string", "minLength": low, "maxLength": high}
        for low, high in [(0, 0), (0, 3), (1, 1), (2, 6), (5, 5), (3, 40)]
    ]
    lengths += [{"type": "string", "minLength": 4}, {"maxLength": 2}]
    patterns = [
        *(r"^a+$", r"^[A-Z]{2}[0-9]{3}$", r"^(cat|dog)s?$", r"^\d{4}-\d{2}$", r"^[^aeiou]{1,6}$"),
        *(r"^\w{2,5}$", r"^x?y*z+$", r"^(ab|cd){1,3}$", r"^[a-f0-9]{8}$", r"^\+?[1-9]\d{1,6}$"),
        *(r"^é[à-ü]{0,3}$", r"^[\u4e00-\u9fff]{2}$", r"^\"quoted\"$", r"^back\\slash$", r"^a/b$"),
        *(r"abc", r"^start", r"end$", r"[0-9]", r"^$", r"^(a|b(c|d(e|f)))$", r"^.{3}$"),
    ]
    formats = [
        *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri"),
        "uuid",
    ]
    return [
        *lengths,
        *({"type": "string", "pattern": pattern} for pattern in patterns),
        *({"type": "string", "format": name} for name in formats),
        {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
    ]


def _values() -> list[Schema]:
    values: list[Any] = [0, -3, 1.5, "", "a", 'q"\\\n', "é😀", True, False, None, [], [1, "x"], {}]
    values += [{"a": {"b": [None]}}, 10**12, "a/b"]
    enums: list[list[Any]] = [["red", "green"], [1, 2, 3], [None, True], [1, "1", [1]], ["a", "ab"]]
    enums += [[{"k": 1}, {"k": 2}], ["é", "e"], [f"value {i}" for i in range(200)]]
    return [
        *({"const": value} for value in values),
        *({"enum": values} for values in enums),
        {"type": "string", "enum": ["x", 1, "y"]},
        {"type": "integer", "enum": [1, 5, 9], "minimum": 4},
    ]


def _arrays() -> list[Schema]:
    items = [_INTEGER, _SHORT, _BOOLEAN, {"enum": ["a", "b"]}, {"type": "array", "items": _NULL}]
    sizes = [(0, 0), (0, 2), (1, 1), (2, 4), (3, 3)]
    sized = [
        {"type": "array", "items": item, "minItems": low, "maxItems": high}
        for item, (low, high) in product(items, sizes)
    ]
    return [
        *sized,
        {"type": "array", "items": _INTEGER, "minItems": 2},
        {"type": "array", "minItems": 1, "maxItems": 2},
        {"type": "array", "prefixItems": [_INTEGER, _SHORT], "items": False},
        {"type": "array", "prefixItems": [_INTEGER, _SHORT], "items": False, "minItems": 2},
        {"type": "array", "prefixItems": [_BOOLEAN], "items": _NULL, "minItems": 1, "maxItems": 3},
        {"type": "array", "prefixItems": [_BOOLEAN, _INTEGER], "minItems": 2, "maxItems": 2},
        {"type": "array", "items": False},
        {"type": "array", "items": _INTEGER, "uniqueItems": False, "maxItems": 2},
    ]


def _objects() -> list[Schema]:
    properties = {"a": _INTEGER, "b": _SHORT, "c": _BOOLEAN}
    names = list(properties)
    subsets = [list(some) for size in range(4) for some in combinations(names, size)]
    return [
        *(_closed(properties, required) for required in subsets),
        *(
            {"type": "object", "properties": properties, "required": required}
            for required in subsets[:5]
        ),
        {"type": "object", "additionalProperties": _INTEGER},
        {"type": "object", "properties": {"a": _SHORT}, "additionalProperties": _BOOLEAN},
        {"type": "object", "required": ["x", "y"], "additionalProperties": _NULL},
        {"type": "object", "patternProperties": {"^n_": _INTEGER}, "additionalProperties": False},
        {
            "type": "object",
            "patternProperties": {"^n[0-9]$": _INTEGER, "^s[0-9]$": _SHORT},
            "properties": {"id": _BOOLEAN},
            "required": ["id"],
            "additionalProperties": False,
        },
        _closed({"a": _INTEGER, "b": _INTEGER}, minProperties=2, maxProperties=2),
        {
            "type": "object",
            "additionalProperties": _INTEGER,
            "minProperties": 1,
            "maxProperties": 2,
        },
        {"type": "object", "additionalProperties": _NULL, "maxProperties": 0},
        {"type": "object", "additionalProperties": False},
        {"properties": {"a": _INTEGER}, "required": ["a"]},
        _closed({'q"uote': _INTEGER, "é": _INTEGER, "": _NULL, "a b": _BOOLEAN}),
        _closed({"outer": _closed({"inner": _closed({"deep": _INTEGER})})}),
        _closed({f"p{i}": _BOOLEAN for i in range(30)}),
        _closed({f"p{i}": _BOOLEAN for i in range(30)}, required=["p3", "p20"]),
        _closed({"list": {"type": "array", "items": _closed({"x": _INTEGER}), "maxItems": 3}}),
    ]


def _combined() -> list[Schema]:
    a, b = _closed({"a": _INTEGER}), _closed({"b": _SHORT})
    return [
        {"anyOf": [_INTEGER, _SHORT]},
        {"anyOf": [a, b]},
        {"anyOf": [a, _NULL, {"enum": ["x"]}]},
        {"anyOf": [{"minimum": 5}, {"maxLength": 2}], "type": ["integer", "string"]},
        {"oneOf": [_INTEGER, _SHORT]},
        {"oneOf": [_closed({"kind": {"const": k}, "v": _INTEGER}) for k in ("p", "q", "r")]},
        {"oneOf": [{"const": "one"}, {"const": "two"}]},
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "string"}]},
        {"allOf": [_INTEGER, {"minimum": 3}, {"maximum": 9}]},
        {"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]},
        {"allOf": [{"properties": {"a": _INTEGER}}, {"required": ["a"]}], "type": "object"},
        {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
        {"allOf": [{"type": "string", "pattern": "^[a-m]+$"}, {"pattern": "^[g-z]+$"}]},
        {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
        {"allOf": [{"anyOf": [_INTEGER, _BOOLEAN]}, {"anyOf": [_BOOLEAN, _NULL]}]},
        {
            "type": "object",
            "allOf": [
                {"properties": {"a": _INTEGER}, "required": ["a"]},
                {"properties": {"b": _SHORT}, "required": ["b"]},
            ],
        },
        {"type": "array", "items": {"anyOf": [_INTEGER, _NULL]}, "minItems": 1, "maxItems": 3},
        {"type": "integer", "anyOf": [{"minimum": 10}, {"maximum": -10}]},
    ]


def _references() -> list[Schema]:
    tree = {
        "type": "object",
        "properties": {"v": _INTEGER, "l": {"$ref": "#/$defs/t"}, "r": {"$ref": "#/$defs/t"}},
        "required": ["v"],
        "additionalProperties": False,
    }
    chain = {"anyOf": [_NULL, _closed({"next": {"$ref": "#/$defs/c"}})]}
    return [
        {"$ref": "#/$defs/a", "$defs": {"a": _INTEGER}},
        {"$ref": "#/definitions/a", "definitions": {"a": _SHORT}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": _BOOLEAN}},
        {"$ref": "#/$defs/t", "$defs": {"t": tree}},
        {"$ref": "#/$defs/c", "$defs": {"c": chain}},
        {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer", "maximum": 5}}},
        _closed({"x": {"$ref": "#/properties/y"}, "y": _INTEGER}),
        {"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": _NULL}},
        {"$ref": "#n", "$defs": {"a": {"$anchor": "n", "type": "integer"}}},
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.com/s",
            "$comment": "c",
            "default": 1,
            "examples": [1],
            "deprecated": True,
            **_closed({"a": {"$ref": "#/$defs/k"}}, **{"$defs": {"k": {"enum": ["u", "v"]}}}),
        },
    ]


def _tools() -> list[Schema]:
    """Argument objects as agents' tools have them, of growing size."""
    kinds = [
        _SHORT,
        _INTEGER,
        _BOOLEAN,
        {"enum": ["low", "high"]},
        {"type": "array", "items": _SHORT, "maxItems": 2},
        {"anyOf": [_INTEGER, _NULL]},
        {"type": "number", "minimum": 0, "maximum": 1},
    ]
    return [
        _closed(
            {f"arg_{i}": {**kinds[(i * step) % 7], "description": "d"} for i in range(size)},
            required=[f"arg_{i}" for i in range(0, size, 2)],
        )
        for size, step in product(range(1, 16), (1, 2, 3, 4, 5))
    ]


FAMILIES = {
    "types": _types(),
    "numbers": _numbers(),
    "strings": _strings(),
    "values": _values(),
    "arrays": _arrays(),
    "objects": _objects(),
    "combined": _combined(),
    "references": _references(),
    "tools": _tools(),
}
SCHEMAS = [schema for family in FAMILIES.values() for schema in family]
