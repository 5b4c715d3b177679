"""`reasoning_effort`, by what the chat template has for it."""

from __future__ import annotations

from typing import Any

import pytest

from client.gateway.errors import ApiError
from client.gateway.openai.serving_chat import effort_variables
from client.protocol import Health

NEVER = Health("ready")
ALWAYS = Health("ready", has_reasoning=True)
QWEN = Health("ready", has_reasoning=True, reasoning_switches=("enable_thinking",))
DEEPSEEK = Health("ready", has_reasoning=True, reasoning_switches=("thinking",))
GPT_OSS = Health("ready", has_reasoning=True, reasoning_switches=("reasoning_effort",))
BOTH = Health("ready", has_reasoning=True, reasoning_switches=("reasoning_effort", "thinking"))


@pytest.mark.parametrize(
    ("model", "effort", "expected"),
    [
        (NEVER, "none", {}),
        (ALWAYS, "medium", {}),
        (QWEN, "none", {"enable_thinking": False}),
        (QWEN, "medium", {"enable_thinking": True}),
        (DEEPSEEK, "medium", {"thinking": True}),
        *((GPT_OSS, effort, {"reasoning_effort": effort}) for effort in ("none", "low", "xhigh")),
        (BOTH, "none", {"thinking": False}),
        (BOTH, "medium", {"reasoning_effort": "medium"}),
    ],
)
def test_the_effort_is_the_templates(model: Health, effort: str, expected: dict[str, Any]) -> None:
    assert effort_variables(effort, model) == expected


@pytest.mark.parametrize(
    ("model", "effort", "fault"),
    [
        (NEVER, "medium", "reasoning_effort: only none with this model"),
        (ALWAYS, "none", "reasoning_effort: only medium with this model"),
        (QWEN, "high", "reasoning_effort: only none and medium with this model"),
    ],
)
def test_what_a_model_cannot_do_is_refused(model: Health, effort: str, fault: str) -> None:
    with pytest.raises(ApiError) as caught:
        effort_variables(effort, model)
    assert str(caught.value).startswith(fault)
    assert caught.value.param == "reasoning_effort"
