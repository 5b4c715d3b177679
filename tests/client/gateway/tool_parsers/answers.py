"""Answers as a server sends them: in sections, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from client.gateway.tool_parsers import AnswerStream, Function, ToolParser
from client.protocol import Section

FUNCTIONS = {
    name: Function(name, parameters)
    for name, parameters in {
        "get_weather": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"enum": ["C", "F"]},
                "at": {"type": "object"},
                "tags": {"type": "array"},
                "limit": {"type": ["number", "null"]},
                "dry": {"type": "boolean"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["city"],
        },
        "now": {},
    }.items()
}


class Answer(NamedTuple):
    """What a client has put together from the deltas."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    finish_reason: str


def read(
    parser: ToolParser | None,
    chunks: Iterable[Sequence[Section]],
    reason: str = "stop",
    functions: Mapping[str, Function] = FUNCTIONS,
) -> Answer:
    """Put an answer together as a strict client does."""
    stream = AnswerStream(parser, functions)
    *before, last = chunks
    deltas = [*(stream.add(chunk) for chunk in before), stream.add(last, reason)]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * len(before)
    content = reasoning = ""
    calls: list[list[Any]] = []
    ids: list[str] = []
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.index == len(calls):
                assert call.id
                assert call.name
                ids.append(call.id)
                calls.append([call.name, ""])
            else:
                assert call.index == len(calls) - 1
                assert not call.id
                assert not call.name
            calls[call.index][1] += call.arguments
    assert len(set(ids)) == len(ids)
    return Answer(
        content, reasoning, [(name, text) for name, text in calls], str(deltas[-1].finish_reason)
    )


def cut(sections: Sequence[Section], at: Iterable[int]) -> list[list[Section]]:
    """Return the chunks of an answer that is cut at these offsets of its texts, one after another.

    Offsets are characters of all texts together; the tag is in the first part of its section.
    """
    length = sum(len(section.text) for section in sections)
    ends = [*sorted({offset for offset in at if 0 < offset < length}), length]
    chunks: list[list[Section]] = []
    chunk: list[Section] = []
    done = 0
    for section in sections:
        text, tag = section.text, section.tag
        while done + len(text) > ends[len(chunks)]:
            size = ends[len(chunks)] - done
            chunk.append(Section(section.type, section.index, text[:size], tag))
            text, tag, done = text[size:], "", done + size
            chunks.append(chunk)
            chunk = []
        chunk.append(Section(section.type, section.index, text, tag))
        done += len(text)
    return [*chunks, chunk]


def content(text: str, index: int = 0, tag: str = "") -> Section:
    """Return a section of the answer itself."""
    return Section("content", index, text, tag)


def tool_call(text: str, index: int = 1, tag: str = "<tool_call>") -> Section:
    """Return a section between the tags of a call."""
    return Section("tool_call", index, text, tag)
