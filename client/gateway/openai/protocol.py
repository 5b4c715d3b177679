"""Bodies of OpenAI's requests and answers: chats, completions and embeddings.

What has the default UNSET is left out of an answer unless it was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from pydantic import Field

from client.gateway.schemas.first_fault import ONE_BY_ONE
from client.gateway.schemas.limits import MAX_MESSAGES, MAX_METADATA, AtMost
from client.gateway.schemas.sampling import (
    Fields,
    No,
    NoTemplate,
    RequestFields,
    Verbosity,
    Yes,
    fault,
    unsupported,
)

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
    """Log-probabilities of a completion's tokens, and offsets of the tokens in its text."""

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
    """A candidate for a token. `bytes` is null if only a part of a character is known."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """The token at a position, and the most likely ones there."""

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


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | dict[str, Any],
    fault("must be none, auto, required or an object"),
]


class ChatRequest(RequestFields):
    """A request to answer a chat.

    The messages are checked where the chat template is applied, with the field of what is wrong.
    `metadata` has no effect: it is for what is stored.
    """

    messages: Annotated[list[dict[str, Any]], AtMost(MAX_MESSAGES, "messages")]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    store: Annotated[No | None, unsupported("not supported here; use /v1/responses")] = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    metadata: Annotated[dict[str, str], ONE_BY_ONE, AtMost(MAX_METADATA, "members")] | None = None
    verbosity: Verbosity = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: NoTemplate = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[None, unsupported("not supported by this version of Trident")] = None
    add_special_tokens: Annotated[
        No, unsupported("not supported for chats: the chat template writes special tokens")
    ] = False
    include_reasoning: Annotated[
        Yes, unsupported("not supported: reasoning is always included")
    ] = True
    echo: Annotated[No, unsupported("echo is supported by /v1/completions only")] = False


Prompts = Annotated[
    str | list[str] | list[int] | list[list[int]],
    fault("must be a string, a list of strings, a list of token ids or a list of such lists"),
]


_Given = str | Sequence[str] | Sequence[int] | Sequence[list[int]]


def prompts_of(given: _Given) -> list[str | list[int]]:
    """Return the prompts in a `Prompts` one by one."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [[each for each in given if isinstance(each, int)]]
    return [each for each in given if not isinstance(each, int)]


def names_of(field: str, given: _Given, number: int) -> dict[str, str]:
    """Return what a client calls the engine's inputs for a prompt of the `Prompts` in a field."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return dict.fromkeys(("text_input", "input_ids"), field if is_one else f"{field}[{number}]")


class CompletionRequest(RequestFields):
    """A request to continue one or several prompts."""

    prompt: Prompts
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: Annotated[
        Yes, unsupported("not supported: send token ids to do without them")
    ] = True

    def prompts(self) -> list[str | list[int]]:
        """Return them one by one."""
        return prompts_of(self.prompt)


class EmbeddingsRequest(Fields):
    """Texts, or prompts of token ids, to be embedded. `user` has no effect: it is for OpenAI."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    # vLLM's
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: Annotated[
        Yes, unsupported("not supported: send token ids to do without them")
    ] = True


_NUMBERS = {"type": "array", "items": {"type": "number"}}


class Embedding(Struct):
    """One of them: numbers, or these in base64, little-endian float32."""

    # Encoded already.
    embedding: Annotated[Raw, Meta(extra_json_schema={"anyOf": [_NUMBERS, {"type": "string"}]})]
    index: int
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    """Those of all inputs, in their order."""

    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"
