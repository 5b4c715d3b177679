"""Writers of one item of a response: what comes of its pieces, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from msgspec import UNSET, structs

from client.gateway.responses.names import CalledName
from client.gateway.schemas.answers import TokenLogprob
from client.gateway.schemas.response_resource import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    FunctionCall,
    ItemEvent,
    Message,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    Status,
    TextDelta,
    TextDone,
)

_ADDED, _DONE = "response.output_item.added", "response.output_item.done"
_PART_ADDED, _PART_DONE = "response.content_part.added", "response.content_part.done"
_CALL = "response.function_call_arguments"


class TextForm(NamedTuple):
    """The form of an item of text: begin of its id, its type, that of its part, their name."""

    prefix: str
    item: type[Message] | type[ReasoningItem]
    part: type[OutputText] | type[ReasoningText]
    event: str


MESSAGE = TextForm("msg", Message, OutputText, "response.output_text")
REASONING = TextForm("rs", ReasoningItem, ReasoningText, "response.reasoning_text")


class TextWriter:
    """Writes a message, or reasoning.

    Attributes:
        form: which of them.
        item: as it was at its begin; whole after `end`.
    """

    def __init__(self, index: int, form: TextForm) -> None:
        """Begin item number `index` of a response."""
        self.form = form
        self.item = form.item(id=new_id(form.prefix), status="in_progress")
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[Event]:
        """Return the events of its begin."""
        return [
            ItemEvent(type=_ADDED, output_index=self._index, item=self.item),
            PartEvent(type=_PART_ADDED, part=self.form.part(), **self._place),
        ]

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[Event]:
        """Write more of it, and return the event of that; only messages have `logprobs`."""
        self._texts.append(text)
        self._logprobs += logprobs
        own = self._with_logprobs(list(logprobs))
        return [TextDelta(type=f"{self.form.event}.delta", delta=text, **self._place, **own)]

    def end(self, status: Status) -> list[Event]:
        """Write no more; return the events of that."""
        text, own = "".join(self._texts), self._with_logprobs(self._logprobs)
        content: Any = [self.form.part(text=text, **own)]
        self.item = self.form.item(id=self.item.id, status=status, content=content)
        return [
            TextDone(type=f"{self.form.event}.done", text=text, **self._place, **own),
            PartEvent(type=_PART_DONE, part=content[0], **self._place),
            ItemEvent(type=_DONE, output_index=self._index, item=self.item),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item.id, "output_index": self._index}

    def _with_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.form is MESSAGE else {}


class CallWriter:
    """Writes a call of a function.

    Attributes:
        item: as in `TextWriter`.
    """

    def __init__(self, index: int, call_id: str, called: CalledName) -> None:
        """Begin item number `index` of a response."""
        self.item = FunctionCall(
            id=new_id("fc"),
            status="in_progress",
            call_id=call_id,
            name=called.name,
            namespace=called.namespace or UNSET,
        )
        self._index = index
        self._arguments: list[str] = []

    def begin(self) -> list[Event]:
        """Return the event of its begin."""
        return [ItemEvent(type=_ADDED, output_index=self._index, item=self.item)]

    def add(self, arguments: str) -> list[Event]:
        """Write more of its arguments, and return the event of that."""
        self._arguments.append(arguments)
        return [ArgumentsDelta(type=f"{_CALL}.delta", delta=arguments, **self._place)]

    def end(self, status: Status) -> list[Event]:
        """Write no more; return the events of that."""
        arguments, item = "".join(self._arguments), self.item
        self.item = structs.replace(item, status=status, arguments=arguments)
        return [
            ArgumentsDone(type=f"{_CALL}.done", name=item.name, arguments=arguments, **self._place),
            ItemEvent(type=_DONE, output_index=self._index, item=self.item),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item.id, "output_index": self._index}


def new_id(prefix: str) -> str:
    """Return an id that nobody else has."""
    return f"{prefix}_{uuid4().hex}"
