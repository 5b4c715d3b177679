"""Calls of tools: found in whole texts, and the same wherever a text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from client import Chunk, Section
from client.gateway.tools.answer import Answer, ToolFormat, read_answer
from client.gateway.tools.json_calls import Call, read_calls
from client.gateway.tools.stream import AnswerStream

FORM = ToolFormat(frozenset({"f", "get_weather"}))
F = '{"name": "f", "arguments": {"a": [1, {"b": "}\\""}]}}'
F_CALL = Call("f", '{"a": [1, {"b": "}\\""}]}', True)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("", []),
        ('{"na', []),
        ('{"name": "f', []),
        ('{"name": "f"', [Call("f", "", False)]),
        ('{"name": "f", "arguments": {"a": 1', [Call("f", '{"a": 1', False)]),
        ('{"name": "f", "arguments": {"a": 1}', [Call("f", '{"a": 1}', False)]),
        (F, [F_CALL]),
        (f"\n{F}\n", [F_CALL]),
        (F.replace("arguments", "parameters"), [F_CALL]),
        (f"[{F}, {F}]", [F_CALL] * 2),
        (f"{F}; {F}", [F_CALL] * 2),
        (f"{F}\n{F}", [F_CALL] * 2),
        ('{"name": "f"}', [Call("f", "{}", True)]),
        ('{"arguments": {"x": 1}, "name": "f"}', [Call("f", '{"x": 1}', True)]),
        ('{"arguments": {"x": 1}, "na', []),
        ('{"id": "7", "type": "function", "name": "f", "x": 1.5}', [Call("f", "{}", True)]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [Call("f", '{"a": 1}', True)]),
        ('{"name": "f", "arguments": "{\\"a', [Call("f", "", False)]),
        ('{"name": "h\\u00e9"}', [Call("hé", "{}", True)]),
        ('{"name": "f", "arguments": {"a": "\\', [Call("f", '{"a": "\\', False)]),
    ],
)
def test_calls_in_a_text(text: str, calls: list[Call]) -> None:
    assert list(read_calls(text).calls) == calls
    assert read_calls(text).is_open


@pytest.mark.parametrize(
    "text", ["hello", "f(x)", "{}", '{"a": 1}', '{"name": 5}', "{name: 1}", '{"name" "f"}', "<x>"]
)
def test_what_is_no_call(text: str) -> None:
    assert read_calls(text).calls == ()
    assert not read_calls(text).is_open


def content(text: str, tag: str = "") -> tuple[str, str, str]:
    return ("content", text, tag)


def call(text: str, tag: str = "<tool_call>") -> tuple[str, str, str]:
    return ("tool_call", text, tag)


def sections(*parts: tuple[str, str, str]) -> list[Section]:
    return [Section(kind, number, text, tag) for number, (kind, text, tag) in enumerate(parts)]


END = content("", "</tool_call>")
THOUGHT = ("reasoning", "hm {", "<think>")


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        ([content("Hi ")], Answer("", "Hi ")),
        ([THOUGHT, content("\n\nHi", "</think>")], Answer("hm {", "\n\nHi")),
        ([call(F), END], Answer("", "", (F_CALL,))),
        (
            [THOUGHT, content("\n\n", "</think>"), call(f"\n{F}\n"), content("\n", "</tool_call>")],
            Answer("hm {", "", (F_CALL,)),
        ),
        (
            [content("Let me see.\n"), call(F), content("\n", "</tool_call>"), call(F), END],
            Answer("", "Let me see.", (F_CALL, F_CALL)),
        ),
        # What is between tags and no call; what is cut off.
        (
            [call("oops"), content(" x", "</tool_call>")],
            Answer("", "<tool_call>oops</tool_call> x"),
        ),
        ([call('{"na')], Answer("", '<tool_call>{"na')),
        ([call('{"name": "f", "arg')], Answer("", "", (Call("f", "", False),))),
        ([call(f"{F} oops"), END], Answer("", "oops", (F_CALL,))),
        # Llama 3: without tags, or after one that nothing closes.
        ([content(F)], Answer("", "", (F_CALL,))),
        ([content(f"\n{F}; {F}")], Answer("", "", (F_CALL, F_CALL))),
        ([content(f"[{F}]")], Answer("", "", (F_CALL,))),
        ([call(F, "<|python_tag|>")], Answer("", "", (F_CALL,))),
        ([content(F.replace('"f"', '"unknown"'))], Answer("", F.replace('"f"', '"unknown"'))),
        ([content('{"a": 1}')], Answer("", '{"a": 1}')),
        ([content("[1, 2] is a list")], Answer("", "[1, 2] is a list")),
        ([content(f"So: {F}")], Answer("", f"So: {F}")),
    ],
)
def test_answers(parts: list[tuple[str, str, str]], answer: Answer) -> None:
    assert read_answer(sections(*parts), FORM, is_over=True) == answer


def test_choices() -> None:
    one = ToolFormat(FORM.names, parallel=False)
    assert read_answer(sections(content(f"[{F},{F}]")), one, is_over=True).calls == (F_CALL,)
    forced = ToolFormat(FORM.names, forced="get_weather")
    given = sections(THOUGHT, content(' {"city": "Rome"}\n', "</think>"))
    assert read_answer(given, forced, is_over=True) == Answer(
        "hm {", "", (Call("get_weather", '{"city": "Rome"}', True),)
    )


TEXTS = st.text('{}[]":,; \n\\ab', max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('{}[]"\\é\n', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@st.composite
def call_texts(draw: st.DrawFn) -> str:
    fields = {"name": draw(st.sampled_from(["f", "get_weather", "other"]))}
    key = draw(st.sampled_from(["arguments", "parameters", "x"]))
    given: dict[str, Any] = {key: draw(st.dictionaries(st.text(max_size=3), JSON, max_size=3))}
    first = draw(st.booleans())
    text = json.dumps({**fields, **given} if first else {**given, **fields})
    return draw(st.sampled_from(["", "\n", " [", "x"])) + text


BODIES = st.lists(call_texts() | TEXTS, max_size=3).map(";".join)
PARTS = st.lists(
    st.tuples(st.sampled_from(["content", "reasoning", "tool_call"]), BODIES), max_size=5
)
FORMS = st.sampled_from(
    [FORM, ToolFormat(FORM.names, parallel=False), ToolFormat(FORM.names, forced="f")]
)


def cut(whole: list[Section], places: list[int]) -> list[list[Section]]:
    """Return the sections in pieces, cut at these places of all their text."""
    pieces: list[list[Section]] = [[]]
    start = 0
    for section in whole:
        inner = sorted({p - start for p in places if start < p < start + len(section.text)})
        bounds = [0, *inner, len(section.text)]
        for number, (a, b) in enumerate(pairwise(bounds)):
            if number:
                pieces.append([])
            tag = "" if number else section.tag
            pieces[-1].append(Section(section.type, section.index, section.text[a:b], tag))
        start += len(section.text)
    return pieces


@given(PARTS, FORMS, st.lists(st.integers(0, 120), max_size=12) | st.just(list(range(400))))
def test_a_stream_cut_anywhere_is_the_whole_answer(
    parts: list[tuple[str, str]], form: ToolFormat, places: list[int]
) -> None:
    whole = sections(*((kind, text, f"<{kind}>") for kind, text in parts))
    expected = read_answer(whole, form, is_over=True)
    stream = AnswerStream(form)
    content, reasoning = "", ""
    calls: list[list[str]] = []
    pieces = cut(whole, places)
    for number, piece in enumerate(pieces):
        reason = "stop" if number == len(pieces) - 1 else None
        delta = stream.delta(Chunk("", sections=tuple(piece), finish_reason=reason))
        content += "" if delta.content is UNSET else delta.content
        reasoning += "" if delta.reasoning is UNSET else delta.reasoning
        for each in () if delta.tool_calls is UNSET else delta.tool_calls:
            if each.id is not UNSET:
                assert each.index == len(calls)
                assert each.function.name is not UNSET
                calls.append([each.function.name, ""])
            calls[each.index][1] += each.function.arguments
    assert (reasoning, content) == (expected.reasoning, expected.content)
    assert calls == [[each.name, each.arguments] for each in expected.calls]


def test_a_call_that_was_cut_off_does_not_end_the_answer_as_one() -> None:
    for text, reason, expected in (
        (F, "stop", "tool_calls"),
        (F, "length", "length"),
        (F[:20], "stop", "stop"),
        (F[:20], "length", "length"),
        ("Hi", "stop", "stop"),
        (F, "abort", "abort"),
    ):
        stream = AnswerStream(FORM)
        chunk = Chunk(text, sections=tuple(sections(content(text))), finish_reason=reason)
        stream.delta(chunk)
        assert stream.finish_reason(chunk) == expected
