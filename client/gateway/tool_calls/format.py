"""ToolCallFormat: how a family of models writes calls of tools. One file per family beside this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from client.gateway.tool_calls.parameters import Parameter, parameters_of

Node = Mapping[str, Any]  # of the format of a structural tag; see `grammar.py`
Notes = dict[Any, Any]  # what is known of a section's text, by place


class ToolCall(NamedTuple):
    """A call, as far as its text goes.

    Attributes:
        name: of the function, whole.
        arguments: JSON text as the model wrote it. Whether it is valid is for the client to check,
            as with OpenAI; where a grammar enforces it, it is.
        is_complete: whether the arguments have ended.
    """

    name: str
    arguments: str
    is_complete: bool


class SectionText(NamedTuple):
    """A section of an answer as far as it goes.

    Attributes:
        text: all of it so far.
        tag: what opened it.
        is_closed: whether it has been ended, so that the text is whole.
        notes: taken while less of it was there, so that what has been read of a long value is not
            read again with each piece.
    """

    text: str
    tag: str
    is_closed: bool
    notes: Notes


class Parsed(NamedTuple):
    """What a text is known to be. What cannot be told yet is in neither.

    Attributes:
        calls: in order.
        content: text that calls nothing.
    """

    calls: tuple[ToolCall, ...] = ()
    content: str = ""


@dataclass(frozen=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: of letters, digits, `_`, `.` and `-`.
        parameters: JSON schema of its arguments.
        is_strict: whether the schema is enforced, and refused if it cannot be.
        place: of it in the request, for errors.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False
    place: str = "tools"

    @cached_property
    def declared(self) -> Mapping[str, Parameter]:
        """The arguments that there are, by name."""
        return parameters_of(self.parameters, strict=False)


class ToolCallFormat(Protocol):
    """One family's form.

    Attributes:
        is_tagged: whether the calls alone are between tags, and so in sections of their own;
            otherwise an answer is a call if it reads as one.
        separator: between two calls.
        trigger: text with which every call begins, and nothing else; "" if there is none.
        late_trigger: what calls begin with if the model forgets what is before it; "" if none does.
        reasoning: what may come before calls that are enforced, if the server does not see to that.
        answer_begin: what opens an answer without calls.
        text: an answer without calls, where calls are not found anywhere in a free text.
        before_text: what may come before `text`, or before the calls instead of it.
    """

    is_tagged: bool
    separator: str
    trigger: str = ""
    late_trigger: str = ""
    reasoning: Node | None = None
    answer_begin: str = ""
    text: Node | None = None
    before_text: Node | None = None

    def parse(self, section: SectionText, functions: Mapping[str, Function]) -> Parsed:
        """Return the calls in a section.

        What is returned for a text is the beginning of what is returned for each longer one: the
        calls, the arguments of the last of them, the content.

        Args:
            section: as far as it goes.
            functions: by name.
        """

    def call(self, function: Function) -> Node:
        """Return the structure of one call, of type `tag`, with all that is around it.

        Raises:
            ValueError: the function is strict, and its schema cannot be enforced in this form.
        """

    def new_id(self) -> str:
        """Return an id for a call, as the family's chat templates take it."""
