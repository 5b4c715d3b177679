"""A chat as OpenAI's clients send it, as the request for the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from client.gateway.errors import ApiError, unsupported
from client.gateway.generation import Generation
from client.gateway.schemas.chat import ChatRequest
from client.gateway.schemas.tokens import TokenizeRequest

MAX_TOP_LOGPROBS = 20  # OpenAI's


def generation_of(body: ChatRequest, request_id: str) -> Generation:
    """Return the request for the server.

    Raises:
        ApiError: a field is wrong or not supported.
    """
    _check(body)
    sampling = body.sampling()
    sampling["return_sections"] = True
    max_tokens = (
        body.max_tokens if body.max_completion_tokens is None else (body.max_completion_tokens)
    )
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    completion = body.max_completion_tokens is not None
    names = {"logprobs": "top_logprobs"}
    return Generation(
        request_id,
        sampling,
        messages=body.messages,
        chat_parameters=chat_parameters(body, body.tools if body.tool_choice != "none" else None),
        priority=body.priority or 0,
        names=names | ({"max_tokens": "max_completion_tokens"} if completion else {}),
        reasoning_effort=body.reasoning_effort,
    )


def chat_parameters(
    body: ChatRequest | TokenizeRequest, tools: Sequence[Mapping[str, Any]] | None
) -> Any:
    """Return what the chat template gets beside the messages."""
    given = {
        "tools": tools,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    return {name: value for name, value in given.items() if value is not None}


def _check(body: ChatRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError("needs stream", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "not together with stream")
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise ApiError(
            f"is {body.max_tokens}, but max_completion_tokens "
            f"{body.max_completion_tokens}; give one of them",
            param="max_tokens",
        )
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise ApiError("needs logprobs", param="top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ApiError(f"must be 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")
