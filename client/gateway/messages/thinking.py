"""What `thinking` and `output_config.effort` are to the model that is served."""

from __future__ import annotations

from typing import Any

from client.gateway.chat.effort import FIELD, switch_of
from client.gateway.errors import ApiError, unsupported
from client.gateway.schemas.messages import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingDisabled,
    ThinkingEnabled,
)
from client.protocol import Health

_EFFORTS = ("low", "medium", "high")  # that models are trained on
_DEFAULT_EFFORT = "high"  # Anthropic's: the same as none


def template_variables(body: CountTokensRequest, model: Health) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets.

    Raises:
        ApiError: the model cannot do what is asked for.
    """
    return {**_thinking(body, model), **_effort(body, model)}


def _thinking(body: CountTokensRequest, model: Health) -> dict[str, Any]:
    thinking = body.thinking
    if thinking is None:
        return {}
    if isinstance(thinking, ThinkingEnabled):
        if not model.has_reasoning:
            raise unsupported(
                "thinking.type", "enabled is not supported: the model has no known reasoning tags"
            )
        if isinstance(body, MessagesRequest):
            _check_budget(thinking.budget_tokens, body.max_tokens)
    is_on = not isinstance(thinking, ThinkingDisabled)
    if (switch := switch_of(model)) is not None:
        return {switch: is_on}
    if model.has_reasoning and not is_on:
        raise unsupported("thinking.type", "disabled is not supported: the model always thinks")
    return {}


def _check_budget(budget_tokens: int, max_tokens: int) -> None:
    if budget_tokens >= max_tokens:
        text = f"must be less than max_tokens ({max_tokens})"
        raise ApiError(text, param="thinking.budget_tokens")


def _effort(body: CountTokensRequest, model: Health) -> dict[str, Any]:
    effort = None if body.output_config is None else body.output_config.effort
    if effort is None:
        return {}
    if FIELD not in model.reasoning_switches:
        if effort == _DEFAULT_EFFORT:
            return {}
        raise unsupported("output_config.effort", f"only {_DEFAULT_EFFORT} with this model")
    if effort not in _EFFORTS:
        raise unsupported("output_config.effort", f"only {', '.join(_EFFORTS)} with this model")
    return {FIELD: effort}
