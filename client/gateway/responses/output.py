"""OutputWriter: from the pieces of an answer to the items of a response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from client.gateway.responses.item_writers import (
    MESSAGE,
    REASONING,
    CallWriter,
    TextForm,
    TextWriter,
)
from client.gateway.responses.names import CalledName
from client.gateway.schemas.answers import TokenLogprob
from client.gateway.schemas.response_resource import Event, OutputItem, ReasoningItem, Status
from client.gateway.tool_calls import Part, ReasoningDelta, ToolCallDelta


class OutputWriter:
    """Puts items together, one after the other, as the model writes them.

    The items do not depend on how the answer was cut into pieces.

    Attributes:
        items: that have ended.
    """

    def __init__(self, names: Mapping[str, CalledName] | None = None) -> None:
        """`names` are those of functions that the model calls otherwise, by what it calls them."""
        self._names = names or {}
        self.items: list[OutputItem] = []
        self._open: TextWriter | CallWriter | None = None
        self._logprobs: list[TokenLogprob] = []  # of tags and blanks: with the text that follows

    def add(self, parts: Iterable[Part], logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Write `parts`, and yield the events of that.

        Args:
            logprobs: of the tokens that are not of reasoning and calls.
        """
        self._logprobs += logprobs
        for part in parts:
            if isinstance(part, ToolCallDelta):
                yield from self._add_call(part)
            elif part.text:
                is_reasoning = isinstance(part, ReasoningDelta)
                yield from self._add_text(part.text, REASONING if is_reasoning else MESSAGE)

    def finish(self, reason: str) -> Iterator[Event]:
        """End the last item, and yield the events of that. An answer of nothing is a message.

        Args:
            reason: why there is no more, in the words of `AnswerDelta`.
        """
        is_whole = reason in ("stop", "tool_calls")
        if is_whole and self._is_silent:
            yield from self._add_text("", MESSAGE)
        # A model may also stop in the midst of a call.
        is_whole &= reason == "tool_calls" or not isinstance(self._open, CallWriter)
        yield from self._end("completed" if is_whole else "incomplete")

    @property
    def _is_silent(self) -> bool:
        return all(isinstance(item, ReasoningItem) for item in self.items) and (
            self._open is None or self._is_open(REASONING)
        )

    def _add_text(self, text: str, form: TextForm) -> Iterator[Event]:
        if not self._is_open(form):
            yield from self._end("completed")
            self._open = TextWriter(len(self.items), form)
            yield from self._open.begin()
        assert isinstance(self._open, TextWriter)
        yield from self._open.add(text, self._take_logprobs() if form is MESSAGE else ())

    def _add_call(self, part: ToolCallDelta) -> Iterator[Event]:
        if part.id:
            yield from self._end("completed")
            called = self._names.get(part.name, CalledName(part.name))
            self._open = CallWriter(len(self.items), part.id, called)
            yield from self._open.begin()
        assert isinstance(self._open, CallWriter), "a call ends before what follows it"
        yield from self._open.add(part.arguments)

    def _end(self, status: Status) -> Iterator[Event]:
        if self._open is None:
            return
        if self._logprobs and self._is_open(MESSAGE):
            yield from self._add_text("", MESSAGE)
        yield from self._open.end(status)
        self.items.append(self._open.item)
        self._open = None

    def _is_open(self, form: TextForm) -> bool:
        return isinstance(self._open, TextWriter) and self._open.form is form

    def _take_logprobs(self) -> list[TokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken
