"""Holds conversations through LiteLLM: `with_litellm.py URL LOGIT_BIAS`."""

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # rather than from GitHub
import litellm

URL, BIAS = sys.argv[1], json.loads(sys.argv[2])
QUESTION = {"role": "user", "content": "Rain in Rome?"}
CITIES = ("Rome", "Zürich")
RUNNER = asyncio.Runner()
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def ask(provider: str, messages: list[Any], **options: Any) -> Any:
    return litellm.completion(**arguments(provider, messages, **options))


def arguments(provider: str, messages: list[Any], **options: Any) -> dict[str, Any]:
    asked = {"model": f"{provider}/ensemble", "api_base": URL, "api_key": "none", "num_retries": 0}
    asked |= {"temperature": 0, "max_tokens": 120, "logit_bias": BIAS, "tools": [TOOL]}
    return {**asked, "messages": messages, **options}


def streamed(provider: str, messages: list[Any], **options: Any) -> Any:
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    return litellm.stream_chunk_builder(list(ask(provider, messages, **options)))


def check_conversation(provider: str, choice: Any) -> None:
    for make in (ask, streamed):
        answer = make(provider, [QUESTION], tool_choice=choice)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.usage.completion_tokens > 1
        message = answer.choices[0].message
        [call] = message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in CITIES
        result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "rain"}
        check_answer(provider, [QUESTION, message.model_dump(), result])


def check_answer(provider: str, history: list[Any]) -> None:
    whole, stream = ask(provider, history), streamed(provider, history)
    later = RUNNER.run(litellm.acompletion(**arguments(provider, history)))
    text = whole.choices[0].message.content
    assert text
    for other in (stream, later):
        assert other.choices[0].message.content == text
        assert other.usage.total_tokens == whole.usage.total_tokens


litellm.suppress_debug_info = True
with RUNNER:
    for provider in ("openai", "hosted_vllm", "litellm_proxy"):
        for choice in ("required", NAMED):
            check_conversation(provider, choice)
