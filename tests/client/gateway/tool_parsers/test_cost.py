"""An answer costs work in proportion to its length, whatever it is made of: for every format."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from client.gateway.tool_parsers import TOOL_PARSERS, AnswerStream
from client.gateway.tool_parsers.section_text import MAX_MEMBERS
from client.protocol import Section
from tests.client.gateway.tool_parsers.answers import FUNCTIONS, content, cut, read, tool_call
from tests.client.gateway.tool_parsers.test_cuts import FAMILIES, Calls, qwen3_coder

WRITERS = {**FAMILIES, "qwen3_coder": ("qwen3_coder", qwen3_coder)}
SHAPES: dict[str, Callable[[int], Calls]] = {
    "members": lambda n: [("get_weather", {f"k{i}": i for i in range(n)})],
    "calls": lambda n: [("now", {})] * n,
    "a list": lambda n: [("get_weather", {"tags": [[i, "a"] for i in range(n)]})],
    "a text": lambda n: [("get_weather", {"city": "if a < b:\n '\"x\\' é\n" * n})],
    "blanks": lambda n: [("get_weather", {"city": " \n\n" * n})],
}
# Sections that no function writes, but a model may: text, what opens it, and the format.
ODD: dict[str, tuple[str, str, Callable[[int], str]]] = {
    "objects in a section": ("hermes", "<tool_call>", lambda n: '{"name": "now"}\n' * n),
    "arguments in a text": (
        "hermes",
        "<tool_call>",
        lambda n: json.dumps({"name": "now", "arguments": json.dumps({"a": '"é\n' * n})}),
    ),
    "members of an object": ("hermes", "<tool_call>", lambda n: '{"name": "now"' + ', "id": 1' * n),
    "arguments before the name": (
        "llama3_json",
        "",
        lambda n: json.dumps({"parameters": {"a": [1] * n}, "name": "now"}),
    ),
    "open brackets": (
        "llama3_json",
        "",
        lambda n: '{"name": "now", "parameters": {"a": ' + "[" * n,
    ),
    "a long key": ("hermes", "<tool_call>", lambda n: '{"' + "key" * n),
    "a long name": ("mistral", "[TOOL_CALLS]", lambda n: "now" * n),
    "a long function": ("pythonic", "", lambda n: "[" + "now" * n),
    "a long keyword": ("pythonic", "", lambda n: "[now(" + "now" * n),
    "parameters again": (
        "qwen3_coder",
        "<tool_call>",
        lambda n: "<function=now>" + "<parameter=a>b</parameter>" * n,
    ),
    "ends that are none": (
        "qwen3_coder",
        "<tool_call>",
        lambda n: "<function=now><parameter=a>" + "\n</parameter>  \n</function>  a" * n,
    ),
    "parameters in a value": (
        "qwen3_coder",
        "<tool_call>",
        lambda n: "<function=get_weather><parameter=city>" + "\n<parameter=cit" * n,
    ),
    "a long parameter": ("qwen3_coder", "<tool_call>", lambda n: "<function=now><parameter=" * n),
    "blanks alone": ("llama3_json", "", lambda n: " \n" * n),
    "an answer of blanks": ("hermes", "", lambda n: "a" + " \n" * n),
}
SMALL, FACTOR = 150, 8
# Linear work takes eight times as long, quadratic work 64 times.
MOST = 24


def sections_of(name: str, shape: str, size: int) -> list[Section]:
    if shape in SHAPES:
        return WRITERS[name][1](SHAPES[shape](size))
    _, tag, written = ODD[shape]
    return [tool_call(written(size), 1, tag) if tag else content(written(size))]


def cost(parser_name: str, sections: list[Section]) -> float:
    """Return the CPU seconds for an answer that comes four characters at a time."""
    chunks = cut(sections, range(0, sum(len(section.text) for section in sections), 4))
    taken = []
    for _ in range(2):
        stream = AnswerStream(TOOL_PARSERS[parser_name], FUNCTIONS)
        started = time.process_time()
        for chunk in chunks:
            stream.add(chunk)
        stream.add([], "stop")
        taken.append(time.process_time() - started)
    return min(taken)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, shape) for name in WRITERS for shape in SHAPES),
        *((name, shape) for shape, (name, _, _) in ODD.items()),
    ],
)
def test_cost_grows_with_the_length_alone(name: str, shape: str) -> None:
    parser_name = WRITERS[name][0] if shape in SHAPES else name
    short, long = (
        cost(parser_name, sections_of(name, shape, size)) for size in (SMALL, FACTOR * SMALL)
    )
    assert long < MOST * max(short, 0.0005)


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder"])
def test_members_beyond_the_limit_are_content(name: str) -> None:
    def answer(size: int) -> list[Section]:
        return WRITERS[name][1]([("now", {f"k{i}": "a" for i in range(size)})])

    whole = read(TOOL_PARSERS[name], [answer(MAX_MEMBERS)])
    assert len(json.loads(whole.calls[0][1])) == MAX_MEMBERS
    assert (whole.content, whole.finish_reason) == ("", "tool_calls")
    more = answer(MAX_MEMBERS + 2)
    cut_off = read(TOOL_PARSERS[name], [more])
    [(_, arguments)] = cut_off.calls
    assert arguments == whole.calls[0][1][:-1]  # without its brace
    assert cut_off.finish_reason == "stop"
    offset = more[0].text.index(f"k{MAX_MEMBERS}")
    assert cut_off.content.endswith(more[0].text[offset:].rstrip())
    assert read(TOOL_PARSERS[name], cut(more, range(0, 100_000, 7))) == cut_off


def test_members_of_a_call_object_beyond_the_limit_are_content() -> None:
    text = '{"name": "now"' + ', "id": 1' * MAX_MEMBERS + ', "arguments": {}}'
    answer = read(TOOL_PARSERS["llama3_json"], [[content(text)]])
    assert (answer.content, answer.calls) == (text, [])
