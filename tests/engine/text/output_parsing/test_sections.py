"""Sections: however a sequence is cut into chunks, they are those of the whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from engine.protocol.messages import OutputDetails
from engine.text.detokenizer import Detokenizer
from engine.text.output_parsing.chunk_parser import ChunkParser, state_after_prompt
from engine.text.output_parsing.parser import ParserState, Section
from engine.text.output_parsing.parser_spec import ParserSpec
from engine.text.output_parsing.tracker import OutputTracker
from engine.text.stop.automaton import StopAutomaton
from engine.text.stop.checker import StopChecker
from tests.factories.costs import Cost, assert_linear, cost_of
from tests.factories.tagged import format_of, tagged

THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
COMMON: dict[str, Any] = {
    "special": tagged(THINK, "special"),
    "added": tagged(THINK, "added"),
    "text": tagged(THINK, "text"),
    "bytes special": tagged(THINK, "special", kind="byte_fallback"),
    "bytes added": tagged(THINK, "added", kind="byte_fallback"),
    "bytes text": tagged(THINK, "text", kind="byte_fallback"),
    "open-ended": tagged(("[THINK]", "[/THINK]", "[TOOL_CALLS]"), "special"),
    "mixed": tagged(("<|tool_call_start|>", "<|tool_call_end|>"), "special"),
    "qwen3_coder": tagged(THINK, "added", opens="\n"),
    "harmony": tagged(
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"),
        "special",
    ),
}


def format_for(detokenizer: Detokenizer) -> ParserSpec:
    """Return its format; of a mixed one, reasoning is plain text and tools are tokens."""
    if detokenizer is COMMON["mixed"]:
        return format_of(detokenizer, "granite", "lfm2")
    if detokenizer is COMMON["qwen3_coder"]:
        return format_of(detokenizer, "auto", "qwen3_coder")
    return format_of(detokenizer)


def merged(parts: Iterable[Section]) -> list[Section]:
    """Join the parts of each section."""
    groups = [list(same) for _, same in groupby(parts, attrgetter("index"))]
    for same in groups:
        assert not any(part.tag for part in same[1:])
    return [
        msgspec.structs.replace(
            same[0],
            text="".join(part.text for part in same),
            num_tokens=sum(part.num_tokens for part in same),
        )
        for same in groups
    ]


def shorthand(sections: Iterable[Section]) -> list[tuple[str, str]]:
    return [(section.type, section.text) for section in sections]


@cache
def pieces(detokenizer: Detokenizer) -> list[list[int]]:
    """Return tags whole, spelt out and incomplete, and texts that are hard to decode."""
    encode = partial(detokenizer.tokenizer.encode, add_special_tokens=False)
    states = format_for(detokenizer).states
    tags = {tag for state in states for tag in (*state.next, *state.inner)}
    found = [encode(text) for text in ("a", " to=f", "analysis", "final", "é", "你好", "\n", "e>")]
    found += [ids[:-1] for ids in found if len(ids) > 1]
    found += [[token_id] for token_id in sorted(detokenizer.tokenizer.special_ids)[:6]]
    for tag in sorted(tags):
        cuts = (tag, tag[:-1], tag + "a", "x" + tag, tag[1:], tag + tag, tag + tag[:2])
        found += [[i for character in text for i in encode(character)] for text in cuts]
        found += [encode(text) for text in cuts] + [encode(tag)] * 8
    if detokenizer is COMMON["harmony"]:
        headers = ("analysis", "final", "commentary to=f <|constrain|>json")
        found += [encode(f"<|channel|>{header}<|message|>") for header in headers] * 30
    return found


def outputs(detokenizer: Detokenizer) -> st.SearchStrategy[list[int]]:
    """Draw tokens with many tags."""
    joined = st.lists(st.sampled_from(pieces(detokenizer)), max_size=16)
    return joined.map(lambda drawn: [token_id for piece in drawn for token_id in piece])


def read_whole(
    detokenizer: Detokenizer,
    output: list[int],
    parser_state: ParserState,
    skip: bool,
    window: list[int],
) -> list[Section]:
    reader = ChunkParser(detokenizer, format_for(detokenizer))
    details = OutputDetails(finish_reason="length", parser_state=tuple(parser_state))
    return reader.read(window, output, details, skip_special_tokens=skip)


@pytest.mark.parametrize("name", COMMON)
@given(data=st.data())
def test_any_cut_gives_the_sections_of_the_whole(name: str, data: st.DataObject) -> None:
    checkpoint = COMMON[name]
    prompt, skip = data.draw(outputs(checkpoint)), data.draw(st.booleans())
    output = data.draw(outputs(checkpoint))
    window = checkpoint.prompt_window(prompt, skip_special_tokens=skip)
    parser_spec = format_for(checkpoint)
    parser_state = state_after_prompt(parser_spec, checkpoint, prompt)
    reader = ChunkParser(checkpoint, parser_spec)
    tracker = OutputTracker(parser_spec, checkpoint, window, parser_state, skip_special_tokens=skip)
    stop = data.draw(st.just([]) | st.lists(st.sampled_from(["ea", "<t", "k>a", "你"]), max_size=2))
    checker = StopChecker(checkpoint, window, StopAutomaton(stop), skip_special_tokens=skip)
    parts: list[Section] = []
    text = ""
    released = count = 0

    def read(end: int, **ending: Any) -> None:
        nonlocal released, text
        context = checkpoint.next_window(window, output[:released], skip_special_tokens=skip)
        details = OutputDetails(parser_state=tuple(tracker.take_parser_state()), **ending)
        new = output[released:end]
        parts.extend(reader.read(context, new, details, skip_special_tokens=skip))
        text += checkpoint.text(context, new, details, skip_special_tokens=skip)
        released = end

    while count < len(output) and checker.match is None:
        checker.append(output[count])
        count += 1
        if checker.match is None:
            tracker.append(output[count - 1], checker.num_held_tokens)
            assert checker.num_held_tokens <= tracker.num_held_tokens <= count - released
            if data.draw(st.booleans()):
                read(count - tracker.num_held_tokens)
    text_cut = checker.finish()
    read(count, finish_reason="stop", text_cut=text_cut)
    whole = OutputDetails(
        finish_reason="stop", text_cut=text_cut, parser_state=(parser_state.state, 0)
    )
    expected = reader.read(window, output[:count], whole, skip_special_tokens=skip)
    assert merged(parts) == expected
    assert text == checkpoint.text(window, output[:count], whole, skip_special_tokens=skip)
    num_tokens = sum(part.num_tokens for part in parts)
    assert num_tokens == count or (num_tokens < count and name == "harmony")  # a header cut off
    event("several sections" if len(expected) > 2 else "few")


def oracle(text: str, tags: dict[str, dict[str, str]]) -> list[tuple[str, str]]:
    """Split `text` with regular expressions; `tags` leads from a kind by a tag to another."""
    sections: list[tuple[str, str]] = []
    kind = "content"
    while True:
        found = re.search("|".join(map(re.escape, tags[kind])), text)
        inside = text if found is None else text[: found.start()]
        if inside or sections:
            sections.append((kind, inside))
        if found is None:
            return sections
        if not sections:
            sections.append((kind, ""))
        kind, text = tags[kind][found.group()], text[found.end() :]


@given(pieces=st.lists(st.sampled_from([*THINK, "<", "</", "think", ">", " a", "é", "<tool"])))
@pytest.mark.parametrize("name", ["special", "added", "text", "bytes text", "bytes added"])
def test_sections_are_those_that_regular_expressions_find(name: str, pieces: list[str]) -> None:
    detokenizer = COMMON[name]
    output = [
        token_id
        for piece in pieces
        for token_id in detokenizer.tokenizer.encode(piece, add_special_tokens=False)
    ]
    found = shorthand(read_whole(detokenizer, output, ParserState(), False, []))
    # Where tags are tokens, a tag that is spelt out is text.
    joined = "".join(pieces)
    if "text" not in name:
        joined = "\0".join(f"\1{piece}" if piece in THINK else piece for piece in pieces)
    named = {tag: tag if "text" in name else f"\1{tag}" for tag in THINK}
    first, last, call, called = named.values()
    interrupt = {call: "tool_call"} if name == "special" else {}
    tags = {
        "content": {first: "reasoning", call: "tool_call"},
        "reasoning": {last: "content", **interrupt},
        "tool_call": {called: "content"},
    }
    expected = [(kind, re.sub("[\0\1]", "", text)) for kind, text in oracle(joined, tags)]
    if expected[:1] == [("content", "")]:
        expected = expected[1:]
    if found[:1] == [("content", "")]:  # tokens that a decoder strips at the start
        found = found[1:]
    text = detokenizer.delta([], output, final=True, skip_special_tokens=False)
    if text == "".join(pieces):  # without what a decoder strips at the start
        assert found == expected


def read_streamed(detokenizer: Detokenizer, output: list[int]) -> list[Section]:
    """Return the sections of an answer that comes token by token."""
    parser_spec = format_for(detokenizer)
    reader = ChunkParser(detokenizer, parser_spec)
    tracker = OutputTracker(parser_spec, detokenizer, [], ParserState(), skip_special_tokens=False)
    parts: list[Section] = []
    window: list[int] = []
    released = 0
    for count, token_id in enumerate(output, start=1):
        tracker.append(token_id, 0)
        is_last = count == len(output)
        end = count if is_last else count - tracker.num_held_tokens
        details = OutputDetails(
            finish_reason="length" if is_last else None,
            parser_state=tuple(tracker.take_parser_state()),
        )
        new = output[released:end]
        parts += reader.read(window, new, details, skip_special_tokens=False)
        window = detokenizer.next_window(window, new, skip_special_tokens=False)
        released = end
    return parts


@pytest.mark.parametrize(
    ("name", "begin", "repeated"),
    [
        ("special", "<think>", "a word "),
        ("special", "", "<tool_call>a</tool_call>"),
        ("text", "<think>", "a word "),
        ("text", "", "<tool_call>a</tool_call>"),
        ("text", "", "<"),
        ("text", "<think>", "</thin "),
        ("bytes text", "<tool_call>", "</tool_cal"),
        ("qwen3_coder", "<tool_call>", "<parameter=a>\n"),
        ("open-ended", "[TOOL_CALLS]", "a word "),
        ("harmony", "<|channel|>", "a word "),
        ("harmony", "<|channel|>analysis", "<|constrain|>"),
        ("harmony", "<|channel|>analysis<|message|>", "a word "),
        ("harmony", "", "<|start|>assistant<|channel|>final<|message|>a<|end|>"),
    ],
)
def test_longer_answer_cost_is_linear(name: str, begin: str, repeated: str) -> None:
    checkpoint = COMMON[name]
    encode = partial(checkpoint.tokenizer.encode, add_special_tokens=False)
    first, again = encode(begin), encode(repeated)

    def cost(count: int) -> Cost:
        output = [*first, *again * (count // len(again))]
        return cost_of(lambda: read_streamed(checkpoint, output), memory=False)

    assert_linear(cost, 1000, doublings=2)
