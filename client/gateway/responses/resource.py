"""`/v1/responses`: a response, its items, and the events of a stream of it."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from client.gateway.openai.protocol import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str = ""


Part = OutputText | ReasoningText


class Message(Struct, kw_only=True, tag_field="type", tag="message"):
    """An answer, or a part of it."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning; `summary` is always empty."""

    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCall(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function of the client's. `id` is the item's, `call_id` what the result names."""

    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


OutputItem = Message | ReasoningItem | FunctionCall


class InputTokensDetails(Struct):
    """`cached_tokens`: those whose KV came from the prefix cache. Writing to it is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """`reasoning_tokens`: those of reasoning, with the tag that opens it."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """Why there is no more."""

    reason: str


class ResponseError(Struct):
    """Why it failed."""

    code: str
    message: str


class Response(Struct, kw_only=True):
    """A response: what was asked for, and what came of it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float | None = None  # until it is known what holds
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float | None = None
    presence_penalty: float
    frequency_penalty: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(Struct):
    """A response that is there no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Struct):
    """Items of a stored response's input, in the form of `input`, each with an id."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class Event(Struct, kw_only=True):
    """What has happened; events are numbered from 0."""

    type: str
    sequence_number: int = -1  # until it is sent


class ResponseEvent(Event, kw_only=True):
    """The response as it is now."""

    response: Response


class ItemEvent(Event, kw_only=True):
    """An item begins or ends."""

    output_index: int
    item: OutputItem


class PartEvent(Event, kw_only=True):
    """The only part of an item begins or ends."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: Part


class TextDelta(Event, kw_only=True):
    """More of a text."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class TextDone(Event, kw_only=True):
    """The whole text."""

    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ArgumentsDelta(Event, kw_only=True):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, kw_only=True):
    """A call's arguments as a whole."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(Event, kw_only=True):
    """What went wrong."""

    type: Literal["error"] = "error"
    code: str | None
    message: str
    param: str | None


EVENTS = (
    ResponseEvent,
    ItemEvent,
    PartEvent,
    TextDelta,
    TextDone,
    ArgumentsDelta,
    ArgumentsDone,
    ErrorEvent,
)
