"""`/v1/responses`: the body of a request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag

from client.gateway.schemas.first_fault import ONE_BY_ONE
from client.gateway.schemas.response_items import TYPE, Input
from client.gateway.schemas.response_tools import Choice, Tool
from client.gateway.schemas.sampling import (
    Fields,
    No,
    RequestFields,
    Verbosity,
    Yes,
    fault,
    unsupported,
)

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_Included = Annotated[
    Literal["message.output_text.logprobs", "reasoning.encrypted_content"],
    unsupported(f"only {LOGPROBS} and {ENCRYPTED} are supported"),
]
_Word = Annotated[str, Field(max_length=512)]


class AnyText(Fields):
    """Free text."""

    type: Literal["text"]


class AnyJson(Fields):
    """A JSON object."""

    type: Literal["json_object"]


class JsonOfSchema(Fields):
    """JSON of a schema; `name` and `description` are for OpenAI's models."""

    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    description: str | None = None


TextFormat = Annotated[
    Annotated[AnyText, Tag("<text>")]
    | Annotated[AnyJson, Tag("<json_object>")]
    | Annotated[JsonOfSchema, Tag("<json_schema>")],
    TYPE.discriminator,
    TYPE.only("text", "json_object", "json_schema"),
]


class TextConfig(Fields):
    """What the text is to be like."""

    format: TextFormat | None = None
    verbosity: Verbosity = None


class Reasoning(Fields):
    """How much the model is to think, by a variable of its chat template.

    A summary is not made: the reasoning itself is there, which says more.
    """

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Fields):
    """What a stream has beside its events."""

    include_obfuscation: Annotated[
        No | None, unsupported("not supported: events are not padded")
    ] = None
    # Load generators send it to each API: AIPerf does.
    include_usage: Annotated[Yes | None, fault("a stream always ends with its usage")] = None


class ResponseRequest(RequestFields):
    """A request for a response.

    `client_metadata` has no effect, and nothing is encrypted: reasoning goes back as its text.
    """

    input: Input
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[_Included] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], _Word], Field(max_length=16), ONE_BY_ONE
        ]
        | None
    ) = None
    client_metadata: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Annotated[
        Literal["disabled"] | None, unsupported("only disabled is supported: nothing is cut")
    ] = None
    background: Annotated[No | None, unsupported("background mode is not supported")] = None
    service_tier: Literal["auto", "default"] | None = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None
    # Of the other routes alone.
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    n: Annotated[Literal[1] | None, fault("a response is one answer")] = None
    response_format: Annotated[None, fault("is text.format here")] = None
    prompt_logprobs: Annotated[None, fault("a response has no place for them")] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probabilities of the text are asked for."""
        return LOGPROBS in (self.include or ())

    @property
    def effort(self) -> str | None:
        """How much the model is to think."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def text_format(self) -> TextFormat:
        """What the text has to be."""
        given = None if self.text is None else self.text.format
        return AnyText(type="text") if given is None else given


class RetrieveQuery(BaseModel):
    """How to get a stored response."""

    model_config = ConfigDict(extra="forbid")

    stream: Annotated[
        Literal["false"] | None, unsupported("streaming of stored responses is not supported")
    ] = None
    include_obfuscation: Annotated[
        Literal["false"] | None, unsupported("not supported: events are not padded")
    ] = None
    include: list[_Included] = Field(default=[], alias="include[]")  # all is there anyway


class InputItemsQuery(BaseModel):
    """Which part of a stored response's input to list."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[_Included] = Field(default=[], alias="include[]")  # all is there anyway
