"""Blocks of an answer: the same however it was cut, and as Anthropic's own client reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from client.gateway.anthropic.events import (
    AnsweredMessage,
    BlockEvent,
    MessageStart,
    MessageUsage,
)
from client.gateway.anthropic.protocol import ThinkingBlock
from client.gateway.anthropic.serving import BlockList, BlockStream, tool_input
from client.gateway.tool_parsers import TOOL_PARSERS, AnswerStream
from client.protocol import Section
from tests.client.gateway.tool_parsers.answers import FUNCTIONS, content, cut, tool_call

TEXTS = st.text(st.sampled_from('a"\\\n{}:, é😀'), max_size=9)
VALUES = st.dictionaries(TEXTS, TEXTS | st.integers() | st.lists(TEXTS, max_size=2), max_size=3)
PLACES = st.lists(st.integers(1, 200), max_size=20) | st.just(range(1, 999))
START = MessageStart(AnsweredMessage("msg_1", "m", [], MessageUsage(1, 0, 1)))
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def sections(reasoning: str, text: str, inputs: Sequence[Any], after: str) -> list[Section]:
    made = [Section("reasoning", 0, reasoning), content(text, 1, "</think>")]
    for arguments in inputs:
        call = json.dumps({"name": "now", "arguments": arguments}, ensure_ascii=False)
        made.append(tool_call(f"\n{call}\n", len(made)))
        made.append(content("\n", len(made), "</tool_call>"))
    last = made.pop()
    return [*made, content(last.text + after, len(made), last.tag)]


def events(
    chunks: Sequence[Sequence[Section]], reason: str = "stop", *, omits_thinking: bool = False
) -> list[BlockEvent]:
    answer = AnswerStream(TOOL_PARSERS["hermes"], FUNCTIONS)
    blocks = BlockStream(omits_thinking=omits_thinking)
    *before, last = chunks
    deltas = [*(answer.add(chunk) for chunk in before), answer.add(last, reason)]
    made = [event for delta in deltas for part in delta.parts for event in blocks.add(part)]
    return [*made, *blocks.end()]


def whole(made: Sequence[BlockEvent]) -> Any:
    """Return the blocks as the answer that comes at once has them."""
    collected = BlockList()
    for event in made:
        collected.add(event)
    return without_ids(msgspec.json.decode(msgspec.json.encode(collected.blocks)))


def accumulated(made: Sequence[BlockEvent]) -> Any:
    """Return the blocks as Anthropic's client puts them together; each event has its type."""
    snapshot, buffers = None, dict[int, bytes]()
    for event in [START, *made]:
        typed = EVENTS.validate_json(msgspec.json.encode(event))
        snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return without_ids([block.to_dict() for block in snapshot.content])


def without_ids(blocks: list[Any]) -> Any:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS, st.lists(VALUES, min_size=1, max_size=2), TEXTS, PLACES)
@example("hm", "Let me see.", [{"city": "Zürich"}], "Done.", range(1, 999))
def test_the_events_add_up_to_the_answer_wherever_it_was_cut(
    reasoning: str, text: str, inputs: list[Any], after: str, places: Sequence[int]
) -> None:
    answer = sections(reasoning, text, inputs, after)
    expected = whole(events([answer]))
    made = events(cut(answer, places))
    assert whole(made) == expected == accumulated(made)
    calls = [block["input"] for block in expected if block["type"] == "tool_use"]
    assert calls == inputs
    kinds = [block["type"] for block in expected]
    assert kinds.count("thinking") == bool(reasoning.strip())


@settings(max_examples=100, deadline=None)
@given(VALUES, PLACES, st.integers(1, 60))
def test_a_call_that_was_cut_off_has_what_there_is(
    value: dict[str, Any], places: Sequence[int], length: int
) -> None:
    call = json.dumps({"name": "now", "arguments": value}, ensure_ascii=False)[:length]
    answer = [tool_call(call, 0)]
    expected = whole(events([answer], "length"))
    made = events(cut(answer, places), "length")
    assert whole(made) == expected == accumulated(made)
    for block in expected:
        if block["type"] == "tool_use":
            assert block["input"].keys() <= value.keys()


def test_thinking_is_signed_in_a_stream_and_in_the_whole() -> None:
    made = events(cut(sections("hm, hm", "a", [], ""), [1, 3]))
    [thinking, _] = whole(made)
    [*_, signed, stopped] = [event for event in made if event.index == 0]
    assert signed.delta.signature == thinking["signature"]
    assert len(thinking["signature"]) == 44
    assert msgspec.json.decode(msgspec.json.encode(stopped)) == {
        "type": "content_block_stop",
        "index": 0,
    }


def test_omitted_thinking_comes_back_by_its_signature() -> None:
    made = events(cut(sections("hm, hé😀", "a", [{}], ""), [1, 3, 9]), omits_thinking=True)
    [thinking, *others] = whole(made)
    assert accumulated(made) == [thinking, *others]
    assert [block["type"] for block in others] == ["text", "tool_use"]
    assert thinking["thinking"] == ""
    assert ThinkingBlock.model_validate(thinking).text == "hm, hé😀"


@pytest.mark.parametrize(
    "signature", [None, "", "EqQBCgIYAhIM1gbcDa9", "omitted.?", "omitted.gA=="]
)
def test_signatures_of_others_have_no_thinking(signature: str | None) -> None:
    assert ThinkingBlock(type="thinking", thinking="", signature=signature).text == ""
    assert ThinkingBlock(type="thinking", thinking="hm", signature=signature).text == "hm"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "{}"),
        ('{"a": 1e400, "b": 123456789012345678901234567890}', None),
        ('{ "a" : "\\u00e9" }', None),
        ('{"a": [1, {"b": "c', '{"a": [1, {}]}'),
        ('{"a": foo}', '{"INVALID_JSON":"{\\"a\\": foo}"}'),
        ('{"a": NaN}', '{"INVALID_JSON":"{\\"a\\": NaN}"}'),
        ("[1]", '{"INVALID_JSON":"[1]"}'),
        ("print(1)", '{"INVALID_JSON":"print(1)"}'),
        ("{" * 9 + '"a', '{"INVALID_JSON":"{{{{{{{{{\\"a"}'),
    ],
)
def test_an_input_is_always_an_object(arguments: str, expected: str | None) -> None:
    made = bytes(tool_input(arguments)).decode()
    assert made == (arguments if expected is None else expected)
    assert isinstance(json.loads(made), dict)
