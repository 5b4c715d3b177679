"""Holds conversations through LangChain: `with_langchain.py URL LOGIT_BIAS`."""

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, BIAS = sys.argv[1], json.loads(sys.argv[2])
QUESTION = HumanMessage("Rain in Rome?")
CITIES = ("Rome", "Zürich")
RUNNER = asyncio.Runner()


@tool
def get_weather(city: Literal["Rome", "Zürich"]) -> str:
    """Tell the weather."""
    return f"{city}: rain"


class Place(BaseModel):
    """A city."""

    city: Literal["Rome", "Zürich"]


def joined(chunks: Any) -> Any:
    whole = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


def check_conversation(model: ChatOpenAI, choice: Any) -> None:
    forced = model.bind_tools([get_weather], tool_choice=choice)
    for answer in (forced.invoke([QUESTION]), joined(forced.stream([QUESTION]))):
        [call] = answer.tool_calls
        assert call["name"] == "get_weather"
        assert not answer.text
        assert answer.usage_metadata["output_tokens"] > 1
        result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        assert result.content.startswith(CITIES)
        check_answer(model.bind_tools([get_weather]), [QUESTION, answer, result])


def check_answer(model: Any, history: list[Any]) -> None:
    whole = model.invoke(history)
    assert whole.text
    assert not whole.tool_calls
    streamed = joined(model.stream(history))
    assert streamed.text == whole.text
    for name in ("input_tokens", "output_tokens"):
        assert streamed.usage_metadata[name] == whole.usage_metadata[name]
    assert RUNNER.run(model.ainvoke(history)).text == whole.text


def main() -> None:
    asked = {"base_url": URL, "api_key": "none", "model": "ensemble", "max_retries": 0}
    asked |= {"temperature": 0, "max_tokens": 120, "stream_usage": True}
    chats = ChatOpenAI(**asked, logit_bias=BIAS)
    for choice in ("required", "get_weather"):
        check_conversation(chats, choice)
    for method in ("function_calling", "json_schema"):
        assert chats.with_structured_output(Place, method=method).invoke("Where?").city in CITIES
    responses = ChatOpenAI(**asked, use_responses_api=True, extra_body={"logit_bias": BIAS})
    check_conversation(responses, "get_weather")


with RUNNER:
    main()
