"""A request for a response, as the request to answer a chat, and what the response says of it."""

from __future__ import annotations

import re
from typing import Any

from client.gateway.errors import ApiError
from client.gateway.responses.tools import OfferedTools
from client.gateway.schemas.chat import ChatRequest
from client.gateway.schemas.response_request import (
    LOGPROBS,
    AnyJson,
    AnyText,
    JsonOfSchema,
    ResponseRequest,
    TextFormat,
)
from client.gateway.schemas.sampling import Fields, SamplingFields
from client.protocol import Health

_SHARED = {*SamplingFields.model_fields, "priority", "return_tokens_as_token_ids"} - {
    "response_format"
}

# Fields of a chat, and what they are called here.
_NAMES = (
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\b(chat_template_kwargs\.)?reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r" without prompt_logprobs\b"), ""),  # which are no field here
    (re.compile(r"(^|\btokens of )messages\b(?!\[)"), r"\1input"),
)
_FILTERS = ("top_p", "top_k", "min_p", "typical_p", "top_n_sigma")


def chat_of(
    body: ResponseRequest, messages: list[dict[str, Any]], tools: OfferedTools
) -> ChatRequest:
    """Return the request to answer `messages`, with `tools`, in the way that `body` asks for.

    Raises:
        ApiError: fields of `body` do not go together.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError("needs stream", param="stream_options")
    if body.top_logprobs and not body.wants_logprobs:
        raise ApiError(f"needs {LOGPROBS} in include", param="top_logprobs")
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in _SHARED},
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        tools=tools.of_chat,
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.effort,
        response_format=_response_format(body.text_format),
        chat_template_kwargs=body.chat_template_kwargs,
    )


def in_names_of_responses(error: ApiError, tools: OfferedTools) -> ApiError:
    """Return an error of a chat in the names that its fields have here."""
    message, *params = map(tools.placed, (error.message, *error.params))
    for pattern, name in _NAMES:
        message, *params = (pattern.sub(name, text) for text in (message, *params))
    return error.reworded(message, params)


def sampling_told(body: ResponseRequest, model: Health) -> dict[str, float]:
    """Return the `temperature` and `top_p` that `model` takes where `body` does not say."""
    defaults = model.sampling_defaults
    # Who shapes the distribution means to draw from it.
    draws = model.do_sample or any(getattr(body, name) is not None for name in _FILTERS)
    used = {
        "temperature": defaults.get("temperature", 1.0) if draws else 0.0,
        "top_p": defaults.get("top_p", 1.0),
    }
    return {name: used[name] if (own := getattr(body, name)) is None else own for name in used}


def told_of(body: ResponseRequest, tools: OfferedTools) -> dict[str, Any]:
    """Return what the response says of `body`: what was asked for, and what holds otherwise."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": body.effort,
            "summary": body.reasoning and body.reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "text": {"format": _told_format(body.text_format), "verbosity": "medium"},
        "tool_choice": _choice(body) or "auto",
        "tools": tools.told,
        "top_logprobs": body.top_logprobs or 0,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _choice(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, Fields) else choice


def _response_format(given: TextFormat) -> dict[str, Any] | None:
    if isinstance(given, AnyText):
        return None
    if isinstance(given, AnyJson):
        return given.model_dump()
    inner = given.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
    return {"type": "json_schema", "json_schema": inner}


def _told_format(given: TextFormat) -> dict[str, Any]:
    if not isinstance(given, JsonOfSchema):
        return given.model_dump()
    return {**given.model_dump(by_alias=True), "strict": given.strict is not False}
