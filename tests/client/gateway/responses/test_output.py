"""However an answer is cut into chunks, the items of its response are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from client.gateway.openai.protocol import TokenLogprob
from client.gateway.responses.serving import OutputWriter
from client.gateway.tool_parsers import TOOL_PARSERS, AnswerStream
from client.protocol import Section
from tests.client.gateway.tool_parsers.answers import FUNCTIONS, content, cut, tool_call

CALL = '{"name": "now", "arguments": {}}'
SECTIONS = [
    Section("reasoning", 0, "hm\n"),
    content("\n\nOK. ", 1, "</think>"),
    tool_call(CALL, 2),
    content("\n", 3, "</tool_call>"),
    tool_call(CALL, 4),
    content(" Bye. ", 5, "</tool_call>"),
    Section("reasoning", 6, "So?", "<think>"),
]


def written(chunks: Sequence[Sequence[Section]], reason: str) -> list[dict[str, Any]]:
    """Return the items without ids; each section of a chunk comes by itself, as with logprobs.

    Each character is a token.
    """
    stream, writer = AnswerStream(TOOL_PARSERS["hermes"], FUNCTIONS), OutputWriter()
    sections = [section for chunk in chunks for section in chunk]
    for number, section in enumerate(sections, 1):
        added = stream.add([section], reason if number == len(sections) else None)
        tokens = section.text if section.type == "content" else ""
        for _ in writer.add(added.parts, [TokenLogprob(each, -1.0, [], []) for each in tokens]):
            pass
    assert added.finish_reason is not None
    for _ in writer.finish(added.finish_reason):
        pass
    items: list[dict[str, Any]] = to_builtins(writer.items)
    return [{k: v for k, v in item.items() if not k.endswith("id")} for item in items]


@given(
    at=st.lists(st.integers(1, 120), max_size=12) | st.just(range(1, 200)),
    count=st.integers(1, len(SECTIONS)),
    reason=st.sampled_from(["stop", "length"]),
)
def test_items_do_not_depend_on_cuts(at: Any, count: int, reason: str) -> None:
    sections = SECTIONS[:count]
    assert written(cut(sections, at), reason) == written([sections], reason)


def test_items_are_in_the_order_of_the_text() -> None:
    items = written([SECTIONS], "stop")
    kinds = ["reasoning", "message", "function_call", "function_call", "message", "reasoning"]
    assert [item["type"] for item in items] == kinds
    assert {item["status"] for item in items} == {"completed"}
    texts = [item["content"][0] for item in items if "content" in item]
    assert [text["text"] for text in texts] == ["hm", "OK.", "Bye.", "So?"]
    for text, tokens in zip(texts[1:3], ("\n\nOK. ", "\n Bye. "), strict=True):
        assert "".join(each["token"] for each in text["logprobs"]) == tokens


@pytest.mark.parametrize(
    ("sections", "reason", "expected"),
    [
        ([content("")], "stop", [("message", "completed")]),
        ([content("")], "length", []),
        (SECTIONS[:1], "stop", [("reasoning", "completed"), ("message", "completed")]),
        (SECTIONS[:1], "length", [("reasoning", "incomplete")]),
        ([content("a")], "error", [("message", "incomplete")]),
        ([tool_call(CALL[:-2] + '"a')], "stop", [("function_call", "incomplete")]),
        ([tool_call(CALL[:-2] + '"a')], "length", [("function_call", "incomplete")]),
    ],
)
def test_what_was_cut_off_is_incomplete(
    sections: list[Section], reason: str, expected: list[tuple[str, str]]
) -> None:
    items = written([sections], reason)
    assert [(item["type"], item["status"]) for item in items] == expected
