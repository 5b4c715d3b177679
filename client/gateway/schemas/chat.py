"""`/v1/chat/completions`: the body of a request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from client.gateway.schemas.sampling import RequestFields, told_as

ToolChoice = Annotated[
    Literal["none", "auto", "required"] | dict[str, Any],
    told_as("must be none, auto, required or an object"),
]


class ChatRequest(RequestFields):
    """A request to answer a chat.

    The messages are checked where the chat template is applied, with the place of what is wrong.
    """

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
