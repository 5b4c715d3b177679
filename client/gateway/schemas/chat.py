"""`/v1/chat/completions`: the body of a request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from client.gateway.schemas.first_fault import ONE_BY_ONE
from client.gateway.schemas.limits import MAX_MESSAGES, MAX_METADATA, AtMost
from client.gateway.schemas.sampling import (
    No,
    NoTemplate,
    RequestFields,
    Verbosity,
    Yes,
    fault,
    unsupported,
)

ToolChoice = Annotated[
    Literal["none", "auto", "required"] | dict[str, Any],
    fault("must be none, auto, required or an object"),
]


class ChatRequest(RequestFields):
    """A request to answer a chat.

    The messages are checked where the chat template is applied, with the place of what is wrong.
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
    store: Annotated[No | None, unsupported("not supported: use /v1/responses")] = None
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
