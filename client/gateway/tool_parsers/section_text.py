"""SectionText: streaming reader of a section's text, which reads each character once.

What reads it is a generator (`Steps`): it yields what it has found, None where it needs more text,
and goes on from there. So no text is read twice, however long a call is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")

MAX_NAME = 256  # characters; the server takes functions with 128
# Of one call. What follows them in a call is content, and the call counts as cut off.
MAX_MEMBERS = 1024

_SPACE = re.compile(r"[ \t\n\r]*")


class CallStart(NamedTuple):
    """A call begins.

    Attributes:
        name: of the function, whole.
    """

    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the call that has begun.

    Attributes:
        text: JSON as the model wrote it. Whether it is valid is for the client to check, as with
            OpenAI; where a grammar enforces it, it is.
    """

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The arguments of the call are complete."""


class PlainText(NamedTuple):
    """Text that calls nothing."""

    text: str


Event = CallStart | CallArguments | CallEnd | PlainText
Steps = Generator[Event | None, None, _T]
Waits = Generator[None, None, _T]  # for more text
Pieces = Iterator[str | None]  # of a text; None where more of it has to come


class EndOfTextError(Exception):
    """The section has ended before what is read has."""


class SectionText:
    """The text of a section, as far as it has come and has not been read.

    What is read is held, for it may be no call, until a call begins.

    Attributes:
        tag: what opened the section.
        has_ended: whether no more text comes.
        is_closed: whether it has ended by itself, not because the sequence was cut off.
    """

    def __init__(self, tag: str = "") -> None:
        self.tag = tag
        self.has_ended = self.is_closed = False
        self._text = ""
        self._position = 0  # before it all has been read
        self._held: list[str] | None = []

    def add(self, text: str) -> None:
        """Add what has come."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self, *, is_closed: bool) -> None:
        """Take note that this was all."""
        self.has_ended, self.is_closed = True, is_closed

    def hold(self) -> None:
        """Hold what is read from here on."""
        self._held = []

    def drop(self) -> None:
        """Hold nothing of what is read."""
        self._held = None

    def release(self) -> str:
        """Return what is held, and what has not been read."""
        held, self._held = self._held or [], None
        return "".join([*held, self.take_all()])

    def take(self, size: int) -> str:
        """Read so many characters, which are there."""
        text = self._text[self._position : self._position + size]
        self._position += size
        if self._held is not None and text:
            self._held.append(text)
        return text

    def take_all(self) -> str:
        """Read all that is there."""
        return self.take(len(self._text) - self._position)

    def put_back(self, text: str) -> None:
        """Let `text` be read again, which was read last while nothing was held."""
        assert self._held is None
        self._text, self._position = text + self._text[self._position :], 0

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match what is there from the next character on."""
        return pattern.match(self._text, self._position)

    def starts_with(self, text: str) -> bool:
        """Return whether what is there begins with `text`."""
        return self._text.startswith(text, self._position)

    def more(self) -> Waits[None]:
        """Wait for more text.

        Raises:
            EndOfTextError: there is none.
        """
        if self.has_ended:
            raise EndOfTextError
        yield None

    def peek(self, size: int = 1) -> Waits[str]:
        """Return the next `size` characters without reading them, fewer at the end.

        Raises:
            EndOfTextError: there is none.
        """
        while len(self._text) - self._position < size and not self.has_ended:
            yield None
        if self._position == len(self._text):
            raise EndOfTextError
        return self._text[self._position : self._position + size]

    def one_of(self, texts: Collection[str]) -> Waits[str]:
        """Return which of `texts` comes next, or "", without reading it.

        Raises:
            EndOfTextError: it may be one that has been cut off.
        """
        for size in range(1, max(map(len, texts)) + 1):
            begun = yield from self.peek(size)
            if begun in texts:
                return begun
            if not any(text.startswith(begun) for text in texts):
                return ""
            if len(begun) < size:
                raise EndOfTextError
        return ""

    def run(self, pattern: re.Pattern[str]) -> Pieces:
        """Read as long as the characters match `pattern`, `[...]*`, or to the end."""
        while True:
            found = self.match(pattern)
            assert found is not None
            if piece := self.take(found.end() - self._position):
                yield piece
            if self._position < len(self._text) or self.has_ended:
                return
            yield None

    def skip(self, pattern: re.Pattern[str] = _SPACE) -> Waits[str]:
        """Read a run as in `run`, of whitespace by default; return what follows it.

        Raises:
            EndOfTextError: nothing does.
        """
        yield from skipped(self.run(pattern))
        return (yield from self.peek())

    def name(self, pattern: re.Pattern[str]) -> Waits[str]:
        """Read a run that is a name; return it, or "" if it is too long for one."""
        pieces: list[str] = []
        for piece in self.run(pattern):
            if piece is None:
                yield None
            elif sum(map(len, [*pieces, piece])) > MAX_NAME:
                return ""
            else:
                pieces.append(piece)
        return "".join(pieces)


def joined(pieces: Pieces) -> Waits[str]:
    """Return a text whole."""
    found = []
    for piece in pieces:
        if piece is None:
            yield None
        else:
            found.append(piece)
    return "".join(found)


def skipped(pieces: Pieces) -> Waits[None]:
    """Read a text and ignore it."""
    for piece in pieces:
        if piece is None:
            yield None
