"""Tool sets of agents, up to hundreds of kilobytes: every call that comes is valid."""

import json
import re
import time
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from engine.bench.tool_sets import ToolSets, calls_schema, calls_tag
from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer
from tests.factories.grammars import RandomWriter, spec

SIZES = [(1, 10_000), (2, 100_000), pytest.param(3, 300_000, marks=pytest.mark.large)]


def _validate(document: Any, schema: Any) -> None:
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(
        document
    )


@pytest.mark.parametrize(("seed", "size"), SIZES)
def test_calls_are_valid_json(
    seed: int, size: int, compiler: GrammarCompiler, writer: RandomWriter
) -> None:
    tools = ToolSets(seed).tools(size)
    assert len(json.dumps(tools)) >= size
    start = compiler.compile(spec(json=calls_schema(tools))).result()
    texts = [text for draw in range(20) if (text := writer.write(start, draw, 900)) is not None]
    assert len(texts) >= 15
    names = set()
    for text in texts:
        call = json.loads(text)
        [function] = [
            tool["function"] for tool in tools if tool["function"]["name"] == call["name"]
        ]
        _validate(call["arguments"], function["parameters"])
        names.add(call["name"])
    assert len(names) > 5


@pytest.mark.parametrize(("seed", "size"), SIZES)
def test_calls_in_text_are_valid(
    seed: int,
    size: int,
    compiler: GrammarCompiler,
    writer: RandomWriter,
    vocabulary: Vocabulary,
    demo: Tokenizer,
) -> None:
    tools = ToolSets(seed).tools(size)
    start = compiler.compile(spec(structural_tag=calls_tag(tools))).result().deep_copy()
    assert start.consume_tokens(demo.encode("Let me see. <function=", add_special_tokens=False))
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    num_calls = 0
    for draw in range(20):
        # Until its end tag: any text may follow it.
        text = writer.write(start, draw, 900, until="</function>")
        if text is not None:
            name, arguments = text.removesuffix("</function>").split(">", 1)
            _validate(json.loads(arguments), parameters[name])
            num_calls += 1
    assert num_calls >= 15


def test_no_broken_utf8_where_a_grammar_meets_words(
    compiler: GrammarCompiler, writer: RandomWriter
) -> None:
    """Tokens that join a space and a word, or end within a character, at the grammar's borders."""
    grammars: list[dict[str, Any]] = [
        {"regex": "the [a-zé你]{2,6} of 世界"},
        {"choice": ["naïve café", "naïve cafés", "日本語 the", "日本"]},
        {"json": {"enum": ["é", "ée", "世 界", "the quick"]}},
        {"grammar": 'root ::= "to " [é-ü]{1,3} (" 你" root)? "."'},
    ]
    for asked in grammars:
        start = compiler.compile(spec(**asked)).result()
        for draw in range(12):
            text = writer.write(start, draw)
            if text is None:
                continue
            assert "\N{REPLACEMENT CHARACTER}" not in text
            if "regex" in asked:
                assert re.fullmatch(asked["regex"], text)
            elif "choice" in asked:
                assert text in asked["choice"]


def test_masks_of_a_large_tool_set_take_no_longer_than_a_step(compiler: GrammarCompiler) -> None:
    start = compiler.compile(spec(json=calls_schema(ToolSets(2).tools(100_000)))).result()
    matcher = start.deep_copy()
    draw, longest = np.random.default_rng(1), 0.0
    for _ in range(100):
        began = time.thread_time()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        longest = max(longest, time.thread_time() - began)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        assert matcher.consume_token(int(draw.choice(allowed)))
        if matcher.is_stopped():
            matcher = start.deep_copy()
    assert longest < 0.1
