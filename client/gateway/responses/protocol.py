"""Bodies of requests of the Responses API: fields, tools and items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from client.gateway.schemas.first_fault import ONE_BY_ONE
from client.gateway.schemas.limits import MAX_ITEMS, AtMost
from client.gateway.schemas.sampling import (
    Fields,
    No,
    RequestFields,
    Verbosity,
    Yes,
    fault,
    unsupported,
)
from client.gateway.schemas.unions import Key

_Status = Literal["in_progress", "completed", "incomplete"]


# It is large, and is not passed to the model.
_Dropped = Annotated[list[dict[str, Any]], AfterValidator(lambda _: [])]


class InputText(Fields):
    """A text of the client's."""

    type: Literal["input_text"]
    text: str


class OutputText(Fields):
    """A text of an answer; annotations and other fields that a client sends back are ignored."""

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


# Only messages and references may leave their type out.
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
    """A message of either side; its `phase` is not passed to the model."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Fields):
    """A call that the model has made; `parsed_arguments` that a client adds are ignored."""

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


# Tools of OpenAI's own: run by its servers, or known to its models alone.
HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
    *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell"),
    *("tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
    "web_search_preview_2025_03_11",
)


class FunctionTool(Fields):
    """A function that the model may call. `strict` is off unless it is asked for.

    `defer_loading` has no effect: all functions are in the prompt.
    """

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class NamespaceTool(Fields):
    """Functions that belong together."""

    type: Literal["namespace"]
    name: str
    description: str
    tools: list[Annotated[FunctionTool, TYPE.only("function")]]


class HostedTool(BaseModel):
    """A tool that this server does not run; its other fields are ignored."""

    model_config = ConfigDict(extra="allow")

    type: str


def _kind(value: Any) -> str:
    found = TYPE.of(value)
    return "<hosted>" if found in HOSTED else f"<{found}>"


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_kind),
    TYPE.only("function", "namespace", *HOSTED),
]


class ChosenFunction(Fields):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class AllowedTools(Fields):
    """The functions that may be called, or of which one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction]


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<None>")]
    | Annotated[
        Annotated[ChosenFunction, Tag("<function>")]
        | Annotated[AllowedTools, Tag("<allowed_tools>")],
        TYPE.discriminator,
        TYPE.only("function", "allowed_tools"),
        Tag("<object>"),
    ],
    Discriminator(lambda value: "<object>" if isinstance(value, dict | Fields) else "<None>"),
]


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

    A summary is not made: the reasoning itself is there.
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
    n: Annotated[Literal[1] | None, fault("must be 1: a response has one answer")] = None
    response_format: Annotated[None, fault("is not supported here; use text.format")] = None
    prompt_logprobs: Annotated[
        None, fault("are not supported: a response has no field for them")
    ] = None

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
