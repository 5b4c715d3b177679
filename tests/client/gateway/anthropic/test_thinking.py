"""Thinking and effort, by what the model has for them."""

from __future__ import annotations

from typing import Any

import pytest

from client.gateway.anthropic.protocol import CountTokensRequest, MessagesRequest
from client.gateway.anthropic.serving import MessagesChat, template_variables
from client.gateway.errors import ApiError
from client.protocol import Health

NEVER = Health("ready")
ALWAYS = Health("ready", has_reasoning=True)
SWITCHED = Health("ready", has_reasoning=True, reasoning_switches=("enable_thinking",))
DEEPSEEK = Health("ready", has_reasoning=True, reasoning_switches=("thinking",))
GPT_OSS = Health("ready", has_reasoning=True, reasoning_switches=("reasoning_effort",))
ENABLED = {"type": "enabled", "budget_tokens": 1999}


def variables(
    model: Health, kind: type[CountTokensRequest] = MessagesRequest, **fields: Any
) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    if kind is MessagesRequest:
        body = {"max_tokens": 2000, **body}
    return template_variables(kind.model_validate(body), model)


@pytest.mark.parametrize(
    ("model", "thinking", "expected"),
    [
        *((model, None, {}) for model in (NEVER, ALWAYS, SWITCHED, GPT_OSS)),
        *((model, {"type": "adaptive"}, {}) for model in (NEVER, ALWAYS, GPT_OSS)),
        (SWITCHED, {"type": "adaptive", "display": "summarized"}, {"enable_thinking": True}),
        (SWITCHED, ENABLED, {"enable_thinking": True}),
        (DEEPSEEK, ENABLED, {"thinking": True}),
        (ALWAYS, ENABLED, {}),
        (SWITCHED, {"type": "disabled"}, {"enable_thinking": False}),
        (NEVER, {"type": "disabled"}, {}),
    ],
)
def test_thinking_is_the_templates_switch(model: Health, thinking: Any, expected: Any) -> None:
    assert variables(model, thinking=thinking) == expected
    assert variables(model, CountTokensRequest, thinking=thinking) == expected


@pytest.mark.parametrize(
    ("thinking", "budget"), [(ENABLED, 1999), ({"type": "adaptive"}, None), (None, None)]
)
def test_the_budget_is_held_by_the_engine(thinking: Any, budget: int | None) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    asked = MessagesRequest.model_validate({**body, "max_tokens": 2000, "thinking": thinking})
    chat = MessagesChat(asked, ALWAYS)
    assert chat.generation(asked, "id").sampling.get("thinking_token_budget") == budget
    refused = ApiError("no", param="thinking_token_budget")
    assert chat.renamed(refused).param == "thinking.budget_tokens"
    assert str(chat.renamed(refused)) == "thinking.budget_tokens: no"


@pytest.mark.parametrize(
    ("model", "effort", "expected"),
    [
        *((model, "high", {}) for model in (NEVER, SWITCHED)),
        *((GPT_OSS, effort, {"reasoning_effort": effort}) for effort in ("low", "medium", "high")),
        (GPT_OSS, None, {}),
    ],
)
def test_effort_is_the_templates(model: Health, effort: Any, expected: Any) -> None:
    assert variables(model, output_config={"effort": effort}) == expected


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (NEVER, {"thinking": ENABLED}, "thinking.type: enabled is not supported"),
        (ALWAYS, {"thinking": {"type": "disabled"}}, "thinking.type: disabled is not supported"),
        (GPT_OSS, {"thinking": {"type": "disabled"}}, "thinking.type: disabled is not supported"),
        (
            ALWAYS,
            {"thinking": {**ENABLED, "budget_tokens": 2000}},
            "thinking.budget_tokens: must be less than max_tokens (2000)",
        ),
        (SWITCHED, {"output_config": {"effort": "low"}}, "output_config.effort: only high"),
        (GPT_OSS, {"output_config": {"effort": "max"}}, "output_config.effort: only low, medium,"),
    ],
)
def test_what_the_model_cannot_do_is_refused(model: Health, fields: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        variables(model, **fields)
    assert str(caught.value).startswith(message)
