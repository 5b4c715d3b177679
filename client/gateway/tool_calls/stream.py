"""AnswerStream: from the sections of one sequence to the deltas of one choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from client.gateway.tool_calls.format import (
    Function,
    Notes,
    Parsed,
    SectionText,
    ToolCall,
    ToolCallFormat,
)
from client.protocol import Section

_NOTHING = Parsed()


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
    """What a chunk adds to an answer.

    Attributes:
        parts: in the order in which the model wrote them.
        finish_reason: at the end, why there is no more: `tool_calls` if there are calls, and none
            of them was cut off; else as the server says.
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


class AnswerStream:
    """Reads the sections of one sequence, cut anywhere.

    The deltas, joined, do not depend on the cuts. Whitespace between sections is left out.
    """

    def __init__(
        self, form: ToolCallFormat | None = None, functions: Mapping[str, Function] | None = None
    ) -> None:
        """Read calls of `functions` in `form`; without one, all but reasoning is content."""
        self._form = form
        self._functions = functions or {}
        self._section = Section("content", -1, "")
        self._parsed = _NOTHING  # of the section, and sent
        self._notes: Notes = {}  # of its text
        self._num_earlier = 0  # calls in the sections before
        self._has_cut_call = False
        self._is_text = False  # a section of calls that are none: its tags are text
        self._is_start = False  # of the section's text: whitespace is left out
        self._space = ""  # that may be at the end
        self._parts: list[Part] = []

    def add(self, sections: Sequence[Section], finish_reason: str | None = None) -> AnswerDelta:
        """Go on with the parts of sections that a chunk has; the last one has the reason."""
        for part in sections:
            if part.index != self._section.index:
                self._end(is_closed=True)
                self._begin(part)
            if self._form_of_section is None:
                self._write(part.text)
                continue
            text = self._section.text + part.text
            self._section = Section(part.type, part.index, text, self._section.tag)
            self._parse(is_closed=False)
        return self._take(None if finish_reason is None else self._finish(finish_reason))

    def _finish(self, reason: str) -> str:
        self._end(is_closed=reason == "stop")
        if self._section.type != "reasoning" and not self._num_calls:
            self._parts.append(ContentDelta(self._space))
        is_called = reason == "stop" and self._num_calls and not self._has_cut_call
        return "tool_calls" if is_called else reason

    @property
    def _num_calls(self) -> int:
        return self._num_earlier + len(self._parsed.calls)

    @property
    def _form_of_section(self) -> ToolCallFormat | None:
        """The form that the section may have calls in."""
        kind, form = self._section.type, self._form
        is_read = kind == "tool_call" or (
            kind == "content" and form is not None and not form.is_tagged
        )
        return form if is_read else None

    def _begin(self, part: Section) -> None:
        was_text = self._is_text
        if "reasoning" in (part.type, self._section.type):
            self._space = ""
        self._num_earlier, self._parsed, self._notes = self._num_calls, _NOTHING, {}
        self._section = Section(part.type, part.index, "", part.tag)
        self._is_text = part.type == "tool_call" and self._form is None
        self._is_start = bool(part.tag) or part.type == "reasoning"
        if self._is_text or (was_text and part.type == "content"):
            self._is_start = False
            self._write(part.tag)

    def _parse(self, *, is_closed: bool) -> None:
        form, section = self._form_of_section, self._section
        if form is not None:
            given = SectionText(section.text, section.tag, is_closed, self._notes)
            self._send(form.parse(given, self._functions))

    def _end(self, *, is_closed: bool) -> None:
        self._parse(is_closed=is_closed)
        if not is_closed and not self._parsed.calls:  # cut off before it was known what it is
            self._send(Parsed(content=self._section.text))
        self._has_cut_call |= any(not call.is_complete for call in self._parsed.calls)

    def _send(self, parsed: Parsed) -> None:
        """Send by how much `parsed` is more than what was sent."""
        sent, self._parsed = self._parsed, parsed
        for place, call in enumerate(parsed.calls):
            known = sent.calls[place] if place < len(sent.calls) else None
            self._send_call(self._num_earlier + place, call, known)
        if len(parsed.content) > len(sent.content):
            if self._section.type == "tool_call" and not self._is_text and not parsed.calls:
                self._is_text, self._is_start = True, False
                self._write(self._section.tag)
            self._write(parsed.content[len(sent.content) :])

    def _send_call(self, index: int, call: ToolCall, sent: ToolCall | None) -> None:
        if sent is None:
            assert self._form is not None
            self._space = ""
            first = ToolCallDelta(index, call.arguments, self._form.new_id(), call.name)
            self._parts.append(first)
        elif len(call.arguments) > len(sent.arguments):
            self._parts.append(ToolCallDelta(index, call.arguments[len(sent.arguments) :]))

    def _write(self, text: str) -> None:
        """Add to the content or the reasoning; whitespace waits for what follows it."""
        text = text.lstrip() if self._is_start else text
        if not text:
            return
        self._is_start = False
        text = self._space + text
        written = text.rstrip()
        self._space = text[len(written) :]
        is_reasoning = self._section.type == "reasoning"
        self._parts.append(ReasoningDelta(written) if is_reasoning else ContentDelta(written))

    def _take(self, finish_reason: str | None) -> AnswerDelta:
        parts, self._parts = self._parts, []
        return AnswerDelta(tuple(parts), finish_reason)
