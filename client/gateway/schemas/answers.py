"""Bodies of responses. What has the default UNSET is left out unless it was asked for."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

# Encoded already: those of a prompt are many.
PromptLogprobs = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {}})]


class PromptTokensDetails(Struct):
    """`cached_tokens`: those whose KV came from the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct):
    """`reasoning_tokens`: those of reasoning, with the tag that opens it."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens of a request, over all of its prompts and sequences."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """Log-probabilities of a completion's tokens, and places of the tokens in its text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    """One sequence, or the next piece of it."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """The answer of `/v1/completions`, or a piece of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct):
    """A token that may stand at a place. `bytes` is null if only a part of a character is known."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """The token at a place, and the most likely ones there."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of all tokens of an answer, its reasoning among them."""

    content: list[TokenLogprob]


class Function(Struct):
    """What is called; a piece of a stream has a part of the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct):
    """A call of a tool."""

    id: str
    function: Function
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """An answer."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same under its newer name
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer to a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(Struct):
    """The answer of `/v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The next piece of a call; the first one has `id`, `type` and the function's name."""

    index: int
    function: Function
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(Struct):
    """The next piece of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    """The next piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(Struct):
    """A piece of a streamed answer."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
