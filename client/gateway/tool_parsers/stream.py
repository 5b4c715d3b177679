"""AnswerStream: from the sections of one sequence to the deltas of one choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from client.gateway.tool_parsers.section_text import (
    CallArguments,
    CallEnd,
    CallStart,
    EndOfTextError,
    Event,
    PlainText,
    SectionText,
    Steps,
)
from client.gateway.tool_parsers.tool_parser import Function, ToolParser
from client.protocol import Section

_PUNCTUATION = " \t\r\n,;}]"  # of calls


@dataclass(frozen=True)
class ToolCallDelta:
    """More of a call, as OpenAI streams it.

    Attributes:
        index: of the call in the answer.
        arguments: what follows those of the earlier deltas.
        id: in the first delta of a call, with the name; else "".
    """

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


Part = ContentDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True)
class AnswerDelta:
    """The delta that a chunk adds to an answer.

    Attributes:
        parts: in the order in which the model wrote them.
        finish_reason: at the end, why there is no more: `tool_calls` if there are calls, and none
            of them was cut off; else the server's.
    """

    parts: tuple[Part, ...] = ()
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The content of all parts."""
        return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))

    @property
    def reasoning(self) -> str:
        """The reasoning of all parts."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningDelta))

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        """The calls of all parts."""
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]


class CallReader:
    """Reads the calls of one section, as its text comes.

    Attributes:
        num_calls: that have begun.
        is_in_call: whether the last of them has not ended.
    """

    def __init__(self, parser: ToolParser, tag: str, functions: Mapping[str, Function]) -> None:
        """Begin a section that `tag` has opened."""
        self.num_calls = 0
        self.is_in_call = False
        self._text = SectionText(tag)
        self._steps = self._read(parser.read(self._text, functions))

    def add(self, text: str) -> Iterator[Event]:
        """Yield what there is in more of the text, and in that before it."""
        self._text.add(text)
        return self._new()

    def end(self, *, is_closed: bool) -> Iterator[Event]:
        """Yield what there is, now that nothing follows."""
        self._text.end(is_closed=is_closed)
        return self._new()

    def _new(self) -> Iterator[Event]:
        for event in self._steps:
            if event is None:
                return
            yield event

    def _read(self, calls: Steps[None]) -> Steps[None]:
        text = self._text
        try:
            for event in calls:
                if isinstance(event, CallStart):
                    self.num_calls += 1
                    text.drop()
                if isinstance(event, CallStart | CallEnd):
                    self.is_in_call = isinstance(event, CallStart)
                yield event
        except EndOfTextError:
            if self.is_in_call:
                return
        # What follows the calls: content, if it is more than their punctuation.
        rest = [text.release()]
        while self.num_calls and not rest[-1].strip(_PUNCTUATION):
            if text.has_ended:
                return
            yield None
            rest.append(text.release())
        yield PlainText("".join(rest))
        while not text.has_ended:
            yield None
            yield PlainText(text.release())


class AnswerStream:
    """Reads the sections of one sequence, cut anywhere.

    The deltas, joined, do not depend on the cuts. Whitespace between sections is left out.
    """

    def __init__(
        self, parser: ToolParser | None = None, functions: Mapping[str, Function] | None = None
    ) -> None:
        """Read calls of `functions` in `parser`; without one, all but reasoning is content."""
        self._parser = parser
        self._functions = functions or {}
        self._section = Section("content", -1, "")
        self._calls: CallReader | None = None  # of the section
        self._num_calls = 0
        self._has_cut_call = False
        self._is_text = False  # a section of calls that are none: its tags are text
        self._is_start = False  # of the section's text: whitespace is left out
        self._space: list[str] = []  # that may be at the end
        self._parts: list[Part] = []

    def add(self, sections: Sequence[Section], finish_reason: str | None = None) -> AnswerDelta:
        """Go on with the parts of sections that a chunk has; the last one has the reason."""
        for part in sections:
            if part.index != self._section.index:
                self._end(is_closed=True)
                self._begin(part)
            if self._calls is None:
                self._write(part.text)
            else:
                self._send(self._calls.add(part.text))
        return self._take(None if finish_reason is None else self._finish(finish_reason))

    def _finish(self, reason: str) -> str:
        self._end(is_closed=reason == "stop")
        if self._section.type != "reasoning" and not self._num_calls:
            self._parts.append(ContentDelta("".join(self._space)))
        is_called = reason == "stop" and self._num_calls and not self._has_cut_call
        return "tool_calls" if is_called else reason

    def _parser_of(self, part: Section) -> ToolParser | None:
        """Return the parser that a section may have calls in."""
        parser = self._parser
        is_read = part.type == "tool_call" or (
            part.type == "content" and parser is not None and not parser.is_tagged
        )
        return parser if is_read else None

    def _begin(self, part: Section) -> None:
        was_text = self._is_text
        if "reasoning" in (part.type, self._section.type):
            self._space = []
        self._section, parser = part, self._parser_of(part)
        self._calls = None if parser is None else CallReader(parser, part.tag, self._functions)
        self._is_text = part.type == "tool_call" and parser is None
        self._is_start = bool(part.tag) or part.type == "reasoning"
        if self._is_text or (was_text and part.type == "content"):
            self._is_start = False
            self._write(part.tag)

    def _end(self, *, is_closed: bool) -> None:
        if self._calls is not None:
            self._send(self._calls.end(is_closed=is_closed))
            self._has_cut_call |= self._calls.is_in_call

    def _send(self, events: Iterable[Event]) -> None:
        assert self._calls is not None
        assert self._parser is not None
        for event in events:
            match event:
                case CallStart(name):
                    self._space = []
                    new = ToolCallDelta(self._num_calls, "", self._parser.new_id(), name)
                    self._parts.append(new)
                    self._num_calls += 1
                case CallArguments(text):
                    self._parts.append(ToolCallDelta(self._num_calls - 1, text))
                case PlainText(text) if text:
                    if self._section.type == "tool_call" and not self._calls.num_calls:
                        self._write_tag()
                    self._write(text)

    def _write_tag(self) -> None:
        """Write what opened the section, once: it is no call."""
        if not self._is_text:
            self._is_text, self._is_start = True, False
            self._write(self._section.tag)

    def _write(self, text: str) -> None:
        """Add to the content or the reasoning; whitespace waits for what follows it."""
        text = text.lstrip() if self._is_start else text
        if not text:
            return
        self._is_start = False
        written = text.rstrip()
        if written:
            whole = "".join([*self._space, written])
            is_reasoning = self._section.type == "reasoning"
            self._parts.append(ReasoningDelta(whole) if is_reasoning else ContentDelta(whole))
            self._space = []
        self._space.append(text[len(written) :])

    def _take(self, finish_reason: str | None) -> AnswerDelta:
        parts, self._parts = self._parts, []
        return AnswerDelta(tuple(_joined(parts)), finish_reason)


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield `parts`, those of one call that follow one another as one."""

    def index(part: Part) -> int | None:
        return part.index if isinstance(part, ToolCallDelta) else None

    for number, group in groupby(parts, index):
        if number is None:
            yield from group
            continue
        first, *others = (part for part in group if isinstance(part, ToolCallDelta))
        yield replace(first, arguments="".join([first.arguments, *(o.arguments for o in others)]))
