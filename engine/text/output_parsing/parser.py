"""Reasoning and tool-call parser: cuts an output into sections of content, reasoning and calls.

The engine and the detokenizer stage read tokens with the same code. The engine sends with each
chunk the state that it starts in, and ends no chunk inside a tag, so the stage keeps no state.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import msgspec

from engine.text.output_parsing.parser_spec import ParserSpec, State

_MAX_STEP = 64  # characters searched at once; what is left after a tag is searched again


class ParserState(NamedTuple):
    """State of the parser between two chunks of a text.

    Attributes:
        state: of the `ParserSpec`.
        number: of the section in the sequence, from 0.
    """

    state: int = 0
    number: int = 0


_BEGIN = ParserState()


class Section(msgspec.Struct, frozen=True, omit_defaults=True):
    """A section, or the part of one that a chunk has; parts have the same `index`.

    Attributes:
        type: `content`, `reasoning` or `tool_call`.
        index: of the section in the sequence, from 0.
        text: without tags. Special tokens are left out, if the request skips them, except in a tool
            call, where they separate its parts.
        tag: what opened the section, in the part where it did: the end tag of the one before, or
            its own start tag; of gpt-oss the whole header, which names the function.
        num_tokens: of the text and of the tag; in the last section also the one that ends the
            sequence. A header that was cut off has no section: its tokens are in none.
    """

    type: str
    index: int
    text: str
    tag: str = ""
    num_tokens: int = 0


class Event(NamedTuple):
    """A piece of text, or a token with a meaning of its own.

    Attributes:
        token_id: None for a piece of text.
        is_shown: whether the text is a part of the sequence's text.
        num_tokens: whose text it is.
    """

    text: str
    token_id: int | None = None
    is_shown: bool = True
    num_tokens: int = 1


class OutputParser:
    """Splits one text into sections, event by event.

    Attributes:
        parser_state: after what has been read.
    """

    def __init__(self, parser_spec: ParserSpec, parser_state: ParserState = _BEGIN) -> None:
        self.parser_state = parser_state
        self._format = parser_spec
        self._parsed: list[Section] = []
        self._header: list[str] = []
        self._pending = ""  # may become a part of a tag
        self._search = 0  # state of the automaton after it
        self._num_tokens = 0  # read, and not yet known to be of which section

    @property
    def state(self) -> State:
        """The state of `parser_state`."""
        return self._format.states[self.parser_state.state]

    @property
    def is_inside_tag(self) -> bool:
        """Whether the last text may be a part of a tag, or is one of a header."""
        return bool(self._pending) or self.state.kind == "header"

    @property
    def begun_tag(self) -> str:
        """The end of the text that may become a tag."""
        return self._pending

    def read(self, events: Iterable[Event]) -> None:
        """Go on with `events`."""
        for text, token_id, is_shown, num_tokens in events:
            if token_id is not None:
                self._read_marker(text, token_id, is_shown)
            else:
                for start in range(0, len(text), _MAX_STEP):
                    self._read_text(text[start : start + _MAX_STEP])
            self._num_tokens += num_tokens
            self._count()

    def take(self) -> list[Section]:
        """Return the parts of sections since the last call, each section once."""
        parsed, self._parsed = self._parsed, []
        return [_joined(list(parts)) for _, parts in groupby(parsed, attrgetter("index"))]

    def finish(self) -> list[Section]:
        """End the text; return the last parts. An incomplete tag is text, a header is not."""
        self._flush()
        return self.take()

    def _read_marker(self, text: str, token_id: int, is_shown: bool) -> None:
        self._flush()
        tag = self._format.tag_of.get(token_id, "")
        if tag in self.state.next:
            self._enter(tag)
        elif is_shown or self.state.kind in ("tool_call", "header"):
            self._write(text)

    def _read_text(self, text: str) -> None:
        while text:
            tags = self.state.text_tags
            self._search, match = tags.advance(self._search, text)
            num_pending = len(self._pending)
            text, self._pending = self._pending + text, ""
            if match is None:
                end = len(text) - tags.held[self._search]
                self._write(text[:end])
                self._pending = text[end:]
                return
            self._write(text[: num_pending + match.start])
            text = text[num_pending + match.end :]
            self._enter(match.stop)

    def _flush(self) -> None:
        self._write(self._pending)
        self._pending, self._search = "", 0
        self._count()

    def _count(self) -> None:
        if self._num_tokens and not self.is_inside_tag:
            part = Section(
                self.state.kind, self.parser_state.number, "", num_tokens=self._num_tokens
            )
            self._parsed.append(part)
            self._num_tokens = 0

    def _write(self, text: str) -> None:
        if self.state.kind == "header":
            self._header.append(text)
        elif text:
            self._parsed.append(Section(self.state.kind, self.parser_state.number, text))

    def _enter(self, tag: str) -> None:
        self._search = 0
        if tag in self.state.inner:
            self._write(tag)
            self.parser_state = ParserState(self.state.inner[tag], self.parser_state.number)
            return
        self._header.append(tag)
        state = self.state.after(tag, "".join(self._header))
        if self._format.states[state].kind == "header":
            self.parser_state = ParserState(state, self.parser_state.number)
            return
        self.parser_state = ParserState(state, self.parser_state.number + 1)
        tag = "".join(self._header)
        self._parsed.append(Section(self.state.kind, self.parser_state.number, "", tag))
        self._header = []


def _joined(parts: list[Section]) -> Section:
    if len(parts) == 1:
        return parts[0]
    text = "".join(part.text for part in parts)
    return msgspec.structs.replace(
        parts[0], text=text, num_tokens=sum(part.num_tokens for part in parts)
    )
