"""Every form in which clients ask for structured output becomes one spec."""

import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.text.grammar.request_formats import guided_decoding, merged, parse_structured_outputs
from engine.text.grammar.spec import MAX_CHARACTERS, GrammarSpec

SCHEMA = {"type": "integer"}
TEXT = json.dumps(SCHEMA)
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.mark.parametrize(
    ("fields", "kind", "text", "field"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT}}, "json_schema", TEXT, "structured_outputs.json"),
        (
            {"structured_outputs": json.dumps({"json": SCHEMA, "regex": None})},
            "json_schema",
            TEXT,
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["é", "b"]}},
            "choice",
            '["é", "b"]',
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": "root ::= [a]"}},
            "grammar",
            "root ::= [a]",
            "structured_outputs.grammar",
        ),
        (
            {"structured_outputs": {"structural_tag": TAGS}},
            "structural_tag",
            json.dumps(TAGS),
            "structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "json_schema",
            '{"type": "object"}',
            "structured_outputs.json_object",
        ),
        ({"guided_decoding": {"json": SCHEMA}}, "json_schema", TEXT, "guided_decoding.json"),
        (
            {"guided_decoding": json.dumps({"choice": ["a"], "backend": "xgrammar"})},
            "choice",
            '["a"]',
            "guided_decoding.choice",
        ),
        (
            {"guided_decoding": {"json_object": True, "regex": None, "backend": None}},
            "json_schema",
            '{"type": "object"}',
            "guided_decoding.json_object",
        ),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": '["a"]'}, "choice", '["a"]', "guided_choice"),
        ({"guided_grammar": "start: A"}, "grammar", "start: A", "guided_grammar"),
        (
            {"response_format": {"type": "json_object"}},
            "json_schema",
            '{"type": "object"}',
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            TEXT,
            "response_format.json_schema.schema",
        ),
        ({"response_format": TAGS}, "structural_tag", json.dumps(TAGS), "response_format"),
    ],
)
def test_request_format_becomes_grammar_spec(
    fields: dict[str, Any], kind: str, text: str, field: str
) -> None:
    found = merged({"n": 2, **fields})
    spec = found.pop("structured_outputs")
    assert found == {"n": 2}
    assert (spec.kind, spec.text, spec.field, spec.strict) == (kind, text, field, True)
    assert parse_structured_outputs(spec.model_dump()) == spec
    assert parse_structured_outputs(spec) is spec


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"guided_json": None},
        {"structured_outputs": None},
        {"guided_decoding": None},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_regex": None},
    ],
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert merged({"n": 1, **fields}) == {"n": 1}


def test_options() -> None:
    asked = {"json": SCHEMA, "strict": False, "begin_after": "</think>"}
    spec = parse_structured_outputs(asked)
    assert (spec.strict, spec.begin_after) == (False, "</think>")
    inner = {"name": "x", "schema": SCHEMA, "strict": False}
    loose = merged({"response_format": {"type": "json_schema", "json_schema": inner}})
    assert loose["structured_outputs"].strict is False


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, " ?"),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": "\t*"}}, "\t*"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ""),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, None),
        ({"structured_outputs": {"structural_tag": TAGS, "disable_any_whitespace": True}}, ""),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, None),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, " ?"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": None}, None),
        (
            {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": "[ ]"},
            "[ ]",
        ),
        ({"guided_decoding": {"json": SCHEMA, "whitespace_pattern": " "}}, " "),
    ],
)
def test_merged_whitespace_is_that_of_the_spec(fields: dict[str, Any], pattern: str | None) -> None:
    spec = merged(fields)["structured_outputs"]
    assert spec.whitespace_pattern == pattern
    assert parse_structured_outputs(spec.model_dump()) == spec
    assert (spec.key == spec.model_copy(update={"whitespace_pattern": None}).key) == (
        pattern is None
    )


def test_the_same_may_be_asked_for_in_two_formats() -> None:
    """Guidance's client for vLLM sends the older form and the newer one."""
    both = {"guided_grammar": "start: A", "structured_outputs": {"grammar": "start: A"}}
    spec = merged(both)["structured_outputs"]
    assert (spec.kind, spec.text) == ("grammar", "start: A")


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json, guided_regex: give only one"),
        (
            {"guided_json": {}, "response_format": {"type": "json_object"}},
            "guided_json, response_format: give only one",
        ),
        (
            {"guided_decoding": {"json": {}}, "structured_outputs": {"json": True}},
            "structured_outputs, guided_decoding: give only one",
        ),
        ({"guided_decoding": {"backend": "auto"}}, "guided_decoding: give exactly one"),
        ({"guided_decoding": {"foo": 1}}, "guided_decoding.foo: unknown field"),
        ({"guided_decoding": "{"}, "guided_decoding: is not valid JSON"),
        ({"structured_outputs": {"backend": "a"}}, "structured_outputs.backend: unknown field"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.json, structured_outputs.regex: give exactly one",
        ),
        ({"structured_outputs": {}}, "structured_outputs: give exactly one"),
        ({"structured_outputs": {"foo": 1}}, "structured_outputs.foo: unknown field"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json: must be an object"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex: must be a string"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice: is not valid JSON"),
        ({"structured_outputs": {"choice": [1]}}, "must be a list of strings"),
        ({"structured_outputs": {"json_object": 3}}, "must be true or false"),
        ({"structured_outputs": {"json": {}, "strict": []}}, "^structured_outputs.strict: "),
        ({"structured_outputs": "{"}, "structured_outputs: is not valid JSON"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": 5}},
            "^structured_outputs.whitespace_pattern: Input should be a valid string",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": "yes"}},
            "^structured_outputs.disable_any_whitespace: must be true or false",
        ),
        (
            {
                "structured_outputs": {
                    "json": {},
                    "disable_any_whitespace": True,
                    "whitespace_pattern": " ",
                }
            },
            "cannot be given together with whitespace_pattern",
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "^structured_outputs.whitespace_pattern: is supported with json",
        ),
        (
            {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}},
            "^structured_outputs.disable_any_whitespace: is supported with json",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern: needs guided_json"),
        (
            {"guided_regex": "a", "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern: is supported for JSON only, not for guided_regex",
        ),
        (
            {"guided_json": {}, "guided_whitespace_pattern": 5},
            "guided_whitespace_pattern: must be a string",
        ),
        (
            {"guided_json": {}, "guided_whitespace_pattern": " " * 2000},
            "guided_whitespace_pattern: has 2000 characters",
        ),
        ({"guided_regex": "\ud800"}, "^guided_regex: .*(unicode|Unicode)"),
        ({"guided_json": {"const": "\ud800"}}, "^guided_json: .*(unicode|Unicode)"),
        ({"structured_outputs": "[" * 10**5}, "structured_outputs: is nested too deeply"),
        ({"structured_outputs": {"json": {"a": float("nan")}}}, "cannot be written as JSON"),
        ({"structured_outputs": {"kind": "x", "text": ""}}, "structured_outputs.kind"),
        ({"guided_regex": "a" * (MAX_CHARACTERS["regex"] + 1)}, "guided_regex: has"),
        ({"response_format": {"type": "xml"}}, "response_format.type: must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: must be"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x: unknown field"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x: unknown field",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}},
            "response_format.json_schema.name: must be a string",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1, "strict": 7}}},
            "response_format.json_schema.schema: must be an object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema: is missing",
        ),
    ],
)
def test_wrong_formats_are_refused_by_name(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(RequestError, match=fault):
        merged(fields)


@pytest.mark.parametrize(
    ("guide_type", "guide", "kind"),
    [
        ("json", "", "json_schema"),
        ("json_schema", TEXT, "json_schema"),
        ("regex", "a", "regex"),
        ("ebnf_grammar", "root ::= [a]", "grammar"),
        ("structural_tag", "{}", "structural_tag"),
    ],
)
def test_the_inputs_of_tensorrt_llm(guide_type: str, guide: str, kind: str) -> None:
    spec = guided_decoding(guide_type, guide)
    assert spec is not None
    assert spec.kind == kind
    assert spec.field.startswith("guided_decoding_guide")
    assert merged({"guided_decoding_guide": spec}) == {"structured_outputs": spec}
    with pytest.raises(RequestError, match="guided_json, guided_decoding_guide: give only one"):
        merged({"guided_decoding_guide": spec, "guided_json": {}})


def test_wrong_inputs_of_tensorrt_llm() -> None:
    assert guided_decoding("", "") is None
    for guide_type, guide, fault in [
        ("xml", "a", "guided_decoding_guide_type: must be json, json_schema, regex"),
        ("", "a", "guided_decoding_guide: needs guided_decoding_guide_type"),
        ("regex", "", "guided_decoding_guide: is missing"),
        ("json", "{}", "must be left out with guided_decoding_guide_type json"),
        ("regex", "a" * (MAX_CHARACTERS["regex"] + 1), "guided_decoding_guide: has"),
    ]:
        with pytest.raises(RequestError, match=fault):
            guided_decoding(guide_type, guide)


def test_errors_name_the_field_of_the_client() -> None:
    spec = GrammarSpec(kind="regex", text="(", field="guided_regex")
    assert str(spec.error("is wrong")) == "guided_regex: is wrong"
