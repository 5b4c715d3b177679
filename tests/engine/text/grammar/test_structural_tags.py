"""Structural tags, in the older form and in xgrammar's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.compose import llguidance_texts
from engine.text.grammar.spec import GrammarSpec, GrammarTextError
from engine.text.tokenizer import Tokenizer
from tests.factories.grammars import follows, spec

TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<fn=add>", "schema": {"type": "integer"}, "end": "</fn>"},
        {"begin": "<fn=say>", "schema": {"enum": ["hi"]}, "end": "</fn>"},
        {"begin": "<|im_start|>", "schema": {"type": "null"}, "end": "<|im_end|>"},
    ],
    "triggers": ["<fn=", "<|im_start|>"],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("free text", (True, True)),
        ("a < b", (True, True)),
        ("call <fn=", (True, False)),
        ("call <fn=add>1</fn>", (True, True)),
        ('call <fn=add>1</fn> and <fn=say>"hi"</fn>.', (True, True)),
        ("call <fn=other>", (False, False)),
        ("call <fn=add>x", (False, False)),
        ("call <fn=say>1", (False, False)),
        ("<|im_start|>null", (True, False)),
        ("<|im_start|>1", (False, False)),
    ],
)
def test_structural_tags(
    text: str, expected: tuple[bool, bool], compiler: GrammarCompiler, demo: Tokenizer
) -> None:
    start = compiler.compile(spec(structural_tag=TAGS)).result()
    assert follows(start, text, demo) == expected


@pytest.mark.parametrize(
    ("tags", "fault"),
    [
        ({}, 'must be an object with "structures" and "triggers"'),
        ({"format": {"type": "tag"}}, "format/begin: is missing"),
        ({**TAGS, "triggers": []}, "triggers: must be"),
        ({**TAGS, "triggers": ["x"]}, "triggers/0: is not the beginning"),
        ({**TAGS, "triggers": ["<fn="]}, "structures/2/begin: must start with one"),
        ({**TAGS, "structures": [1]}, "structures: must be a list of objects"),
        ({**TAGS, "structures": [{"begin": 1}]}, "structures/0/begin: must be a string"),
        ({**TAGS, "structures": [{"begin": "a", "x": 1}]}, "structures/0/x: unknown field"),
        (
            {"structures": [{"begin": "<f", "schema": {"not": {}}}], "triggers": ["<"]},
            'structures/0/schema: #: keyword "not" is not enforced',
        ),
    ],
)
def test_wrong_structural_tags(tags: dict[str, Any], fault: str) -> None:
    with pytest.raises(GrammarTextError, match=fault):
        next(llguidance_texts(GrammarSpec(kind="structural_tag", text=json.dumps(tags)), {}))


ANY: dict[str, Any] = {"type": "any_text"}
DIGIT = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}}
QUOTE = {"type": "tag", "begin": "<|im_start|>say:", "content": ANY, "end": "!<|endoftext|>"}
CALL = {"type": "tag", "begin": "<f>", "content": DIGIT, "end": "</f>"}


# The end of a sequence cannot be inside one, so <|im_end|> is not used.
ONE, TWO = "<f>1</f>", "<f>1</f>, <|im_start|>say:a <|im_start|> 1!<|endoftext|>"


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def separated(**options: bool) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [CALL, QUOTE], "separator": ", ", **options}


def triggered(**options: bool) -> dict[str, Any]:
    return {
        "type": "triggered_tags",
        "tags": [CALL, QUOTE],
        "triggers": ["<f>", QUOTE["begin"]],
    } | (options)


@pytest.mark.parametrize(
    ("node", "complete", "begun", "wrong"),
    [
        (ANY, ["", "a<|im_start|>b"], [], []),
        (
            {**ANY, "excludes": ["<|im_start|>", "<f>"]},
            ["", "a<f <|endoftext|>>", "<|endoftext|><|endoftext|>b"],
            [],
            ["<|im_start|>", "a<f>b", "<|endoftext|><f>"],
        ),
        (
            {**QUOTE, "content": {**ANY, "excludes": ["<f>", "<|im_start|>"]}},
            ["<|im_start|>say:hi <f!<|endoftext|>"],
            ["<|im_start|>say:!!"],
            ["<|im_start|>say:<|im_start|>", "<|im_start|>say:a<f>"],
        ),
        (
            {**CALL, "content": {**ANY, "excludes": ["no"]}},
            ["<f>n<|im_start|>o</f>"],
            ["<f>n"],
            ["<f>a no", "<f><|im_start|>no"],
        ),
        (
            {"type": "sequence", "elements": [{"type": "regex", "pattern": r"[/\n]\d+"}, ANY]},
            ["/12a<|im_start|>", "\n1"],
            ["/"],
            ["1", "/a", "<|im_start|>"],
        ),
        (const("a<|endoftext|>b"), ["a<|endoftext|>b"], ["a"], ["ab"]),
        ({"type": "or", "elements": [const("a"), DIGIT]}, ["a", "7"], [], ["b", "a7", "77"]),
        ({"type": "sequence", "elements": [const("a"), ANY]}, ["a", "ab"], [], ["b"]),
        (
            {"type": "sequence", "elements": [{"type": "optional", "content": DIGIT}, const("a")]},
            ["a", "1a"],
            ["1"],
            ["11", "b"],
        ),
        (QUOTE, ["<|im_start|>say:hi!<|endoftext|>"], ["<|im_start|>say:!!"], ["<|im_start|>x"]),
        (separated(), ["", ONE, TWO, f"{TWO}, {ONE}"], ["<f>", f"{ONE}, "], [f"{ONE}{ONE}", "a"]),
        (separated(at_least_one=True), [ONE, TWO], ["", f"{ONE}, "], ["a"]),
        (separated(stop_after_first=True), ["", ONE], [], [TWO]),
        (separated(at_least_one=True, stop_after_first=True), [ONE], [""], [TWO]),
        (
            triggered(),
            ["", "a", f"a {ONE}b {TWO}c"],
            ["a <f>"],
            ["<f>a", "<|im_start|>a"],
        ),
        (triggered(at_least_one=True), [ONE, f"a{TWO}b"], ["", "a"], ["<f>a"]),
        (triggered(stop_after_first=True), ["", "a", f"a{ONE}"], ["<f>"], [f"{ONE}b"]),
        (triggered(at_least_one=True, stop_after_first=True), [f"a{ONE}"], ["a"], [f"{ONE}b"]),
    ],
)
def test_formats(
    node: dict[str, Any],
    complete: list[str],
    begun: list[str],
    wrong: list[str],
    compiler: GrammarCompiler,
    demo: Tokenizer,
) -> None:
    asked = {"type": "structural_tag", "format": node}
    start: LLMatcher = compiler.compile(spec(structural_tag=asked)).result()
    assert {text: follows(start, text, demo) for text in complete} == dict.fromkeys(
        complete, (True, True)
    )
    assert {text: follows(start, text, demo) for text in begun} == dict.fromkeys(
        begun, (True, False)
    )
    assert {text: follows(start, text, demo)[0] for text in wrong} == dict.fromkeys(wrong, False)


def deep(levels: int) -> dict[str, Any]:
    return {"type": "optional", "content": deep(levels - 1)} if levels else ANY


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        ([], "format/type: must be one of any_text, const_string"),
        ({"type": "grammar", "grammar": ""}, "format/type: must be one of"),
        ({**ANY, "excludes": []}, "format/excludes: must be a list of strings, none of them empty"),
        ({**ANY, "excludes": [""]}, "format/excludes: must be a list of strings, none"),
        ({**ANY, "without": []}, "format/without: unknown field"),
        ({"type": "regex", "pattern": 1}, "format/pattern: must be a string"),
        ({"type": "const_string", "value": 1}, "format/value: must be a string"),
        ({"type": "or", "elements": []}, "format/elements: must not be empty"),
        ({"type": "sequence", "elements": [1]}, "format/elements/0/type: must be"),
        ({**separated(), "tags": [ANY]}, "format/tags/0/type: must be tag"),
        ({**triggered(), "triggers": [1]}, "format/triggers: must be a list of strings"),
        (
            {**triggered(), "triggers": ["x"]},
            "format/triggers/0: is not the beginning of any of the format/tags",
        ),
        ({**triggered(), "triggers": ["<f>"]}, "format/tags/1/begin: must start with one"),
        ({**DIGIT, "json_schema": {"not": {}}}, "format/json_schema: #: keyword"),
        (deep(40), "/content: is nested deeper than 32 formats"),
    ],
)
def test_wrong_formats(node: Any, fault: str) -> None:
    text = json.dumps({"format": node})
    with pytest.raises(GrammarTextError, match=fault):
        next(llguidance_texts(GrammarSpec(kind="structural_tag", text=text), {}))


def test_a_schema_may_be_lenient(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    node = {"type": "json_schema", "json_schema": {"not": {}, "enum": [1]}, "strict": False}
    assert follows(compiler.compile(spec(structural_tag={"format": node})).result(), "1", demo)[1]
