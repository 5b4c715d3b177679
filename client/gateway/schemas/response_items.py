"""`/v1/responses`: the items of a request's `input`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo, field_validator

from client.gateway.schemas.limits import MAX_ITEMS, AtMost
from client.gateway.schemas.sampling import Fields
from client.gateway.schemas.unions import Key

_Status = Literal["in_progress", "completed", "incomplete"]


# It is large, and says nothing to the model.
_Dropped = Annotated[list[dict[str, Any]], AfterValidator(lambda _: [])]


class InputText(Fields):
    """A text of the client's."""

    type: Literal["input_text"]
    text: str


class OutputText(Fields):
    """A text of an answer; what the client has made of it, and what is beside it, say nothing."""

    type: Literal["output_text"]
    text: str
    annotations: _Dropped = Field(default_factory=list)
    logprobs: _Dropped = Field(default_factory=list)
    parsed: Any = Field(None, exclude=True)


class Refusal(Fields):
    """What another server's model would not answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Its text."""
        return self.refusal


# Only messages and references need not say what they are.
TYPE = Key(
    "type",
    lambda item: "message" if "role" in item else "item_reference" if [*item] == ["id"] else None,
)


def _is_list(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")],
    TYPE.discriminator,
    TYPE.only("input_text", "output_text", "refusal"),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Tag("<list>")], Discriminator(_is_list)
]


class MessageItem(Fields):
    """A message of either side; its `phase` says nothing to the model."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Fields):
    """A call that the model has made; what the client has made of its arguments says nothing."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: _Status | None = None
    parsed_arguments: Any = Field(None, exclude=True)


class FunctionCallOutputItem(Fields):
    """What a call has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: _Status | None = None


class SummaryText(Fields):
    """A summary of reasoning, by another server."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(Fields):
    """Reasoning itself."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Fields):
    """Reasoning of the model; if its text is not there, the summary stands for it.

    What is encrypted can be read by who wrote it alone, so it has to be beside one of them.
    """

    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)
    id: str | None = None
    status: _Status | None = None
    encrypted_content: str | None = None

    @field_validator("encrypted_content")
    @classmethod
    def _is_readable(cls, value: str, others: ValidationInfo) -> str:
        if not (others.data.get("content") or others.data.get("summary")):
            raise ValueError("cannot be read by this server: the text of the reasoning is needed")
        return value

    @property
    def text(self) -> str:
        """Its text."""
        return "\n".join(part.text for part in self.content or self.summary)


class ItemReference(Fields):
    """An item of a response that was stored."""

    type: Literal["item_reference"] = "item_reference"
    id: str


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    TYPE.discriminator,
    TYPE.only("message", "function_call", "function_call_output", "reasoning", "item_reference"),
]
Input = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[InputItem], AtMost(MAX_ITEMS, "items"), Tag("<list>")],
    Discriminator(_is_list),
]
