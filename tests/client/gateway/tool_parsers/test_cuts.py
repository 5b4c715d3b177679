"""However an answer is cut into chunks, its deltas add up to the same: for all texts and cuts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.gateway.tool_parsers import TOOL_PARSERS, Function
from client.protocol import Section
from tests.client.gateway.tool_parsers.answers import FUNCTIONS, content, cut, read, tool_call

TEXTS = st.text(st.sampled_from("a\"'\\\n{}[](),=:; <>/é😀\u2028u0d8Pp"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-9, 9, width=16) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(sorted(FUNCTIONS)),
        st.dictionaries(st.sampled_from(["city", "at", "x1", "limit"]), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
LONG = range(0, 1_000_000, 4)
PLACES = st.lists(st.integers(1, 400), max_size=30) | st.just(range(1, 2000))
Calls = list[tuple[str, dict[str, Any]]]


def json_text(call: tuple[str, dict[str, Any]], key: str = "arguments", **options: Any) -> str:
    return json.dumps({"name": call[0], key: call[1]}, **options)


def hermes(calls: Calls) -> list[Section]:
    sections = [Section("reasoning", 0, "hm\n"), content("\n\nOK. ", 1, "</think>")]
    for call in calls:
        index = len(sections)
        sections.append(tool_call(f"\n{json_text(call, ensure_ascii=False)}\n", index))
        sections.append(content("\n", index + 1, "</tool_call>"))
    return sections


def pythonic(calls: Calls) -> list[Section]:
    texts = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    ]
    return [content(f"[{', '.join(texts)}]")]


def mistral(calls: Calls) -> list[Section]:
    return [
        tool_call(f"{name}[ARGS]{json.dumps(given)}", i, "[TOOL_CALLS]")
        for i, (name, given) in enumerate(calls, 1)
    ]


def harmony(calls: Calls) -> list[Section]:
    header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    return [
        tool_call(json.dumps(given), i, header.format(name))
        for i, (name, given) in enumerate(calls, 1)
    ]


def qwen3_coder(calls: Calls) -> list[Section]:
    made = []
    for i, (name, own) in enumerate(calls, 1):
        written = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in own.items())
        made.append(tool_call(f"\n<function={name}>\n{written}</function>\n", i))
    return made


FAMILIES: dict[str, tuple[str, Callable[[Calls], list[Section]]]] = {
    "hermes": ("hermes", hermes),
    "llama3_json": (
        "llama3_json",
        lambda calls: [content("; ".join(json_text(call, "parameters") for call in calls))],
    ),
    "pythonic": ("pythonic", pythonic),
    "mistral": ("mistral", mistral),
    "mistral_list": (
        "mistral",
        lambda calls: [
            tool_call(f"[{', '.join(map(json_text, calls))}]", 1, "[TOOL_CALLS]"),
        ],
    ),
    "harmony": ("openai", harmony),
}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25)
@given(calls=CALLS, places=PLACES)
def test_calls_come_back_whatever_they_hold(
    family: str, calls: Calls, places: Sequence[int]
) -> None:
    name, written = FAMILIES[family]
    answer = read(TOOL_PARSERS[name], cut(written(calls), places))
    assert [(called, json.loads(text)) for called, text in answer.calls] == calls
    assert answer.finish_reason == "tool_calls"
    assert answer.content == ("OK." if family == "hermes" else "")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_call_takes_no_longer_per_token(family: str) -> None:
    """What has been read of it is not read again with each token: that would be 20 s here."""
    name, written = FAMILIES[family]
    calls = [("now", {"limit": [{"a": i, "b": "x"} for i in range(3_000)]})]
    chunks = cut(written(calls), range(0, 100_000, 4))
    started = time.process_time()
    answer = read(TOOL_PARSERS[name], chunks)
    assert time.process_time() - started < 5
    assert [(called, json.loads(text)) for called, text in answer.calls] == calls


@pytest.mark.parametrize("family", ["pythonic", "qwen3_coder"])
@pytest.mark.parametrize("text", ["if a < b:\n    print('''x''', \"y\")\n" * 3_000, "x" * 100_000])
def test_a_long_text_takes_no_longer_per_token(family: str, text: str) -> None:
    calls: Calls = [("get_weather", {"city": text, "note": text})]
    chunks = cut({"pythonic": pythonic, "qwen3_coder": qwen3_coder}[family](calls), LONG)
    started = time.process_time()
    answer = read(TOOL_PARSERS[family], chunks)
    assert time.process_time() - started < 5
    assert [(called, json.loads(text)) for called, text in answer.calls] == calls


@settings(max_examples=25)
@given(given=st.dictionaries(st.sampled_from(["city", "x1"]), TEXTS, max_size=2), places=PLACES)
def test_texts_of_qwen3_coder_come_back(given: dict[str, str], places: Sequence[int]) -> None:
    texts = {key: value.replace("</", "<") for key, value in given.items()}
    answer = read(TOOL_PARSERS["qwen3_coder"], cut(qwen3_coder([("get_weather", texts)]), places))
    [(_, arguments)] = answer.calls
    assert json.loads(arguments) == texts


@given(
    pieces=st.lists(st.sampled_from(["</parameter>", "</", "<", "\n", " ", "a"]), max_size=9),
    places=PLACES,
)
def test_a_text_of_qwen3_coder_may_have_the_tag_that_ends_it(
    pieces: list[str], places: Sequence[int]
) -> None:
    given = {"city": "".join(pieces), "note": "b"}
    answer = read(TOOL_PARSERS["qwen3_coder"], cut(qwen3_coder([("get_weather", given)]), places))
    [(_, arguments)] = answer.calls
    assert json.loads(arguments) == given


@settings(max_examples=25)
@given(
    given=st.dictionaries(st.sampled_from(["city", "note"]), TEXTS, min_size=1),
    ends=st.lists(st.sampled_from(["\n</parameter>", ""]), min_size=3, max_size=3),
    places=PLACES,
)
def test_a_parameter_ends_where_the_next_begins(
    given: dict[str, str], ends: list[str], places: Sequence[int]
) -> None:
    texts = {key: value.replace("</", "<") for key, value in given.items()} | {"days": "3"}
    written = "".join(
        f"<parameter={k}>\n{v}{end}\n" for (k, v), end in zip(texts.items(), ends, strict=False)
    )
    section = [
        tool_call(f"\n<function=get_weather>\n{written}</function>\n"),
        content("", 2, "</tool_call>"),
    ]
    properties = {"city": {"type": "string"}, "note": {"type": "string"}, "days": {}}
    functions = {"get_weather": Function("get_weather", {"properties": properties})}
    answer = read(TOOL_PARSERS["qwen3_coder"], cut(section, places), functions=functions)
    [(_, arguments)] = answer.calls
    assert json.loads(arguments) == texts | {"days": 3}
    assert answer.finish_reason == "tool_calls"


# Pieces of all forms: whole calls, and what nearly is one.
PIECES = st.sampled_from(
    [
        *("{", "}", "[", "]", "(", ")", ",", ":", ";", '"', "'", "'''", "\\", " ", "\n", "a", "é"),
        *('{"name": "', '"name": ', '"now"', '"arguments": ', '"parameters": ', '"id": 3', "null"),
        *('"get_weather"', "now", "get_weather", "city=", "days=", "=", "1", "-", "#", "\\ud83d"),
        *("\\ude00", "\\u", "<function=", "now>", "<parameter=", "city>\n", "days>", "</function>"),
        *("\n<parameter=", "get_weather>", "\n</function>"),
        *("</parameter>", "\n</", "parameter>", "[ARGS]", "[CALL_ID]", "True", '{"a": 1}', '"{'),
    ]
)
GARBLED = st.lists(PIECES, max_size=25).map("".join)


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
@settings(max_examples=50)
@given(
    texts=st.lists(GARBLED, min_size=1, max_size=3),
    places=PLACES,
    reason=st.sampled_from(["stop", "length"]),
)
def test_any_text_is_read_the_same_however_it_is_cut(
    name: str, texts: list[str], places: Sequence[int], reason: str
) -> None:
    tags = {
        "openai": "<|channel|>commentary to=functions.now<|message|>",
        "qwen3_coder": "<function=",
    }
    tag = tags.get(name, "<tag>")
    sections = [content(texts[0])]
    for text in texts[1:]:
        sections.append(tool_call(text, len(sections), tag))
        sections.append(content(text, len(sections), "</tag>"))
    parser = TOOL_PARSERS[name]
    whole = read(parser, [sections], reason)
    assert read(parser, cut(sections, places), reason) == whole
    if whole.finish_reason != reason:
        assert whole.calls
