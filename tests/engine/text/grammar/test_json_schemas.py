"""Documents drawn from compiled JSON schemas are valid; what cannot be enforced is refused."""

import json
from collections.abc import Callable
from datetime import datetime, time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.json_schema import MAX_DEPTH, prepare_schema
from engine.text.grammar.spec import GrammarTextError
from engine.text.tokenizer import Tokenizer
from tests.factories.grammars import RandomWriter, follows, spec
from tests.factories.json_schemas import FAMILIES, SCHEMAS

# jsonschema checks these only with packages that are not installed.
_DATES: dict[str, Callable[[str], object]] = {
    "date-time": datetime.fromisoformat,
    "time": time.fromisoformat,
}


def _checker() -> FormatChecker:
    checker = FormatChecker(Draft202012Validator.FORMAT_CHECKER.checkers)
    for name, parse in _DATES.items():
        checker.checks(name, raises=ValueError)(
            # Python knows no leap seconds.
            lambda text, parse=parse: bool(parse(text.upper().replace(":60", ":59")))
        )
    return checker


def _validate(text: str, schema: Any) -> None:
    Draft202012Validator(schema, format_checker=_checker()).validate(json.loads(text))


def test_there_are_three_hundred_different_schemas() -> None:
    assert len({json.dumps(schema, sort_keys=True) for schema in SCHEMAS}) >= 300


@pytest.mark.parametrize("family", FAMILIES)
def test_every_finished_document_is_valid(
    family: str, compiler: GrammarCompiler, writer: RandomWriter
) -> None:
    num_finished = 0
    for schema in FAMILIES[family]:
        matcher = compiler.compile(spec(json=schema)).result()
        for seed in range(2):
            text = writer.write(matcher, seed)
            if text is not None:
                num_finished += 1
                _validate(text, schema)
    assert num_finished >= 1.8 * len(FAMILIES[family])


@st.composite
def _schemas(draw: st.DrawFn, depth: int = 3) -> Any:
    kinds = ["integer", "string", "enum", *(["array", "object", "anyOf"] if depth else [])]
    kind, inner = draw(st.sampled_from(kinds)), _schemas(depth=depth - 1)
    match kind:
        case "integer":
            low = draw(st.integers(-1000, 1000))
            return {"type": kind, "minimum": low, "maximum": low + draw(st.integers(0, 5000))}
        case "string":
            low = draw(st.integers(0, 4))
            return {"type": kind, "minLength": low, "maxLength": low + draw(st.integers(0, 4))}
        case "enum":
            integers = st.integers(-(2**53), 2**53)
            values = st.none() | st.booleans() | integers | st.text(max_size=8)
            return {"enum": draw(st.lists(values, min_size=1, max_size=4))}
        case "array":
            low = draw(st.integers(0, 2))
            return {"type": kind, "items": draw(inner), "minItems": low, "maxItems": low + 1}
        case "anyOf":
            return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3))}
    properties = draw(st.dictionaries(st.text(max_size=4), inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    closed = {"additionalProperties": False}
    return {"type": kind, "properties": properties, "required": required, **closed}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=_schemas(), seed=st.integers(0, 1000))
def test_documents_of_schemas_that_hypothesis_writes(
    schema: Any, seed: int, compiler: GrammarCompiler, writer: RandomWriter
) -> None:
    matcher = compiler.compile(spec(json=schema)).result()
    if (text := writer.write(matcher, seed)) is not None:
        _validate(text, schema)


_NOT_ENFORCED: list[dict[str, Any]] = [
    {"not": {"type": "integer"}},
    {"if": {"type": "integer"}, "then": {"minimum": 1}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {}},
    {"type": "array", "minContains": 1},
    {"type": "array", "unevaluatedItems": False},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {}}},
    {"type": "object", "dependencies": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "string", "contentEncoding": "base64"},
    {"type": "integer", "nullable": True},
    {"type": "integer", "format": "int32"},
    {"type": "string", "format": "unknown"},
    {"$dynamicRef": "#a"},
    {"x-guidance": {"lenient": True}, "not": {}},
    {"type": "integer", "minimun": 3},
    {"const": {"a": [2**53 + 1]}},
    {"discriminator": {"propertyName": "a"}},
]


@pytest.mark.parametrize("inner", _NOT_ENFORCED)
def test_what_is_not_enforced_is_refused_with_its_place(
    inner: dict[str, Any], compiler: GrammarCompiler
) -> None:
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "items": inner}}}
    with pytest.raises(GrammarTextError, match=r"#/properties/a~1b/items: .* is not enforced"):
        compiler.compile(spec(json=schema)).result()
    compiler.compile(spec(json=schema, strict=False)).result()  # then it is ignored


_NOT_COMPILED: list[tuple[dict[str, Any], Any]] = [
    ({"type": "string", "pattern": "^(?!a)b$"}, "abc"),
    ({"type": "string", "pattern": r"(a)\1", "maxLength": 3}, "abc"),
    ({"type": "string", "pattern": "("}, "abc"),
    (
        {
            "type": "object",
            "patternProperties": {"^(?=a)": {"type": "integer"}, "^b": {"type": "integer"}},
            "additionalProperties": False,
        },
        {"a": "x", "b": 1},
    ),
    ({"$ref": "https://example.com/schema.json"}, {"a": 1}),
    ({"$ref": "other.json#/$defs/a", "type": "string"}, "abc"),
    ({"$ref": "#/nowhere"}, [1]),
    ({"$ref": "#nowhere"}, [1]),
    ({"$ref": "#/components/a", "components": {"a": {}}}, [1]),
]


@pytest.mark.parametrize(("inner", "value"), _NOT_COMPILED)
def test_what_cannot_be_compiled_is_refused_only_if_strict(
    inner: dict[str, Any], value: Any, compiler: GrammarCompiler, demo: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"x": inner, "n": {"type": "integer"}}}
    with pytest.raises(GrammarTextError):
        compiler.compile(spec(json=schema)).result()
    matcher = compiler.compile(spec(json=schema, strict=False)).result()
    assert follows(matcher, json.dumps({"x": value, "n": 1}), demo) == (True, True)
    assert not follows(matcher, json.dumps({"x": value, "n": "a"}), demo)[0]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "integer"}}},
        {"$ref": "#n", "$defs": {"a": {"$anchor": "n", "type": "integer"}}},
        {"$ref": "https://a/n", "$defs": {"a": {"$id": "https://a/n", "type": "integer"}}},
        {"$id": "https://a/n", "$ref": "https://a/n#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    ],
)
def test_references_that_can_be_followed_are_enforced(
    schema: dict[str, Any], compiler: GrammarCompiler, demo: Tokenizer
) -> None:
    for strict in (True, False):
        matcher = compiler.compile(spec(json=schema, strict=strict)).result()
        assert follows(matcher, "1", demo) == (True, True)
        assert not follows(matcher, '"a"', demo)[0]


@pytest.mark.parametrize("keyword", ["oneOf", "anyOf"])
def test_discriminators_of_alternatives_are_annotations(
    keyword: str, compiler: GrammarCompiler, demo: Tokenizer
) -> None:
    def pet(kind: str) -> dict[str, Any]:
        properties = {"kind": {"const": kind, "type": "string"}}
        return {"type": "object", "properties": properties, "required": ["kind"]}

    mapping = {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}
    schema: dict[str, Any] = {
        "$defs": {"cat": pet("cat"), "dog": pet("dog")},
        "discriminator": {"propertyName": "kind", "mapping": mapping},
        keyword: [{"$ref": ref} for ref in mapping.values()],
    }
    matcher = compiler.compile(spec(json=schema)).result()
    assert follows(matcher, '{"kind": "dog"}', demo) == (True, True)
    assert not follows(matcher, '{"kind": "cow', demo)[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"const": "a"}, {"const": "a"}),
        ({"const": "a"}, {"enum": ["b", "a"]}),
        ({"const": "a"}, {"type": "string"}),
        ({"const": 1}, {"const": 1.0}),
    ],
)
def test_alternatives_that_a_tag_does_not_tell_apart_are_refused(
    first: dict[str, Any], second: dict[str, Any], compiler: GrammarCompiler
) -> None:
    definitions = {
        name: {"type": "object", "properties": {"kind": kind}, "required": ["kind"]}
        for name, kind in (("a", first), ("b", second))
    }
    alternatives = [{"$ref": f"#/$defs/{name}"} for name in definitions]
    with pytest.raises(GrammarTextError, match="oneOf"):
        compiler.compile(spec(json={"oneOf": alternatives, "$defs": definitions})).result()
    del definitions["b"]["required"]
    definitions["b"]["properties"] = {"kind": {"const": "b"}}
    with pytest.raises(GrammarTextError, match="oneOf"):
        compiler.compile(spec(json={"oneOf": alternatives, "$defs": definitions})).result()


_CONTRADICTIONS: list[tuple[Any, str]] = [
    (False, "Unsatisfiable"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "Unsatisfiable"),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "Unsatisfiable"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "integer", "enum": ["a"]}, "Unsatisfiable"),
    ({"type": "object", "required": ["z"], "additionalProperties": False}, "Unsatisfiable"),
    ({"$ref": "#"}, "no finite document"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite document"),
    (
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"c": {"$ref": "#/$defs/n"}},
                    "required": ["c"],
                }
            },
        },
        "no finite document",
    ),
]
_WRONG: list[tuple[Any, str]] = [
    ("{", "not valid JSON: .* line 1"),
    ('{"const": NaN}', "NaN"),
    ({"items": {"type": ["null", "foo"]}}, "^#/items/type: must be of string, "),
    ({"properties": {"a": 1}}, "#/properties/a: must be an object or a boolean"),
    ({"properties": []}, "#/properties: must be an object"),
    ({"anyOf": {}}, "#/anyOf: must be a list"),
    ({"oneOf": []}, "Unsatisfiable|oneOf"),
    ({"type": "string", "minLength": "x"}, "minLength"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"$ref": "http://example.com/s"}, "http://example.com/s"),
    ({"$ref": "#/nowhere"}, "nowhere"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
]


@pytest.mark.parametrize(("schema", "fault"), [*_CONTRADICTIONS, *_WRONG])
def test_schemas_that_nothing_can_match_or_that_are_wrong(
    schema: Any, fault: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(GrammarTextError, match=fault):
        compiler.compile(spec(json=schema)).result()


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
def test_deep_schemas_are_refused(depth: int) -> None:
    text = '{"items": ' * depth + "{}" + "}" * depth
    with pytest.raises(GrammarTextError, match="nested"):
        prepare_schema(text, strict=True)


def test_annotations_are_left_out_and_names_of_properties_are_kept() -> None:
    schema = {"title": "t", "properties": {"title": {"default": 1}}, "const": {"title": 1}}
    prepared = prepare_schema(json.dumps(schema), strict=True)
    del prepared["x-guidance"]
    assert prepared == {"properties": {"title": {}}, "const": {"title": 1}}


_DOCUMENT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "null"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_COMPACT = '{"a":1,"b":[]}'
_PRETTY = '{\n  "a": 1,\n  "b": [\n\t\tnull\n  ]\n}'


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        (
            {},
            [_COMPACT, _PRETTY, '{ "a" : 1 , "b" : [ ] }', '{\r\n\r\n"a":1,"b":[]}'],
            ['{  "a":1,"b":[]}', '{\n\n\n"a":1,"b":[]}', '{"a":\n' + " " * 21, '{"a": \n'],
        ),
        ({"disable_any_whitespace": True}, [_COMPACT], ['{"a": 1', '{\n"a"']),
        ({"whitespace_pattern": "[ ]?"}, [_COMPACT, '{ "a": 1, "b": []}'], ["{  ", "{\n"]),
        ({"whitespace_pattern": r"[ \n\t]{1,30}"}, [_COMPACT, _PRETTY], ["{" + " " * 31]),
    ],
)
@pytest.mark.parametrize("form", ["json", "structural_tag"])
def test_blanks_between_the_tokens_of_a_document_are_bounded(
    form: str,
    options: dict[str, Any],
    allowed: list[str],
    refused: list[str],
    compiler: GrammarCompiler,
    demo: Tokenizer,
) -> None:
    tag = {"format": {"type": "json_schema", "json_schema": _DOCUMENT}}
    asked: dict[str, Any] = {form: _DOCUMENT if form == "json" else tag}
    start = compiler.compile(spec(**asked, **options)).result()
    for text in allowed:
        assert follows(start, text, demo) == (True, True), text
    for text in refused:
        assert not follows(start, text, demo)[0], text


@pytest.mark.parametrize("pattern", ["(", "(?=a)"])
def test_a_whitespace_pattern_that_is_no_regular_expression_is_refused(
    pattern: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(
        GrammarTextError, match="whitespace_pattern: is not a valid regular expression"
    ):
        compiler.compile(spec(json=_DOCUMENT, whitespace_pattern=pattern)).result()
