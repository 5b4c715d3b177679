"""How much a model is to think: `reasoning_effort`, as the chat template of a model has it."""

from __future__ import annotations

from typing import Any

from client.gateway.errors import unsupported
from client.protocol import Health

FIELD = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")  # variables that switch it on and off

_OFF, _DEFAULT = "none", "medium"  # OpenAI's


def switch_of(model: Health) -> str | None:
    """Return the variable of the chat template that switches thinking on and off, if it has one."""
    return next((name for name in _SWITCHES if name in model.reasoning_switches), None)


def effort_variables(effort: str, model: Health) -> dict[str, Any]:
    """Return the variables of the chat template that an effort sets.

    Levels are the template's own affair. With a switch, `none` is off; if there are no levels,
    `medium`, OpenAI's default, is on. A model that has neither takes the one that it always does.

    Raises:
        ApiError: the model cannot do that.
    """
    switch = switch_of(model)
    if switch is not None and effort == _OFF:
        return {switch: False}
    if FIELD in model.reasoning_switches:
        return {FIELD: effort}
    if switch is not None and effort == _DEFAULT:
        return {switch: True}
    always = _DEFAULT if model.has_reasoning else _OFF
    if effort != always:
        allowed = always if switch is None else f"{_OFF} and {_DEFAULT}"
        raise unsupported(FIELD, f"only {allowed} with this model: its chat template has no levels")
    return {}
