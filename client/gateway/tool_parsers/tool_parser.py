"""ToolParser: reads and enforces a family's tool calls. One file per family is beside this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from client.gateway.tool_parsers.parameters import Parameter, parameters_of
from client.gateway.tool_parsers.section_text import SectionText, Steps

Node = Mapping[str, Any]  # of the format of a structural tag; see `grammar.py`


@dataclass(frozen=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: of letters, digits, `_`, `.` and `-`.
        parameters: JSON schema of its arguments.
        is_strict: whether the schema is enforced, and refused if it cannot be.
        param: its field in the request, for errors.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False
    param: str = "tools"

    @cached_property
    def declared(self) -> Mapping[str, Parameter]:
        """The arguments that there are, by name."""
        return parameters_of(self.parameters, strict=False)


class ToolParser(Protocol):
    """Reads the tool calls that a family of models writes, and gives the grammar of them.

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

    def read(self, text: SectionText, functions: Mapping[str, Function]) -> Steps[None]:
        """Read the calls in a section, up to what is none: that is held, or comes next.

        What is found does not depend on how the text was cut, and the work is linear in its length.

        Args:
            text: of the section.
            functions: by name.

        Raises:
            EndOfTextError: the section has ended.
        """

    def call(self, function: Function) -> Node:
        """Return the structure of one call, of type `tag`, with all that is around it.

        Raises:
            InvalidRequestError: the function is strict, and this form cannot enforce its schema.
        """

    def new_id(self) -> str:
        """Return an id for a call, as the family's chat templates take it."""
