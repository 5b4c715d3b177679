"""Responses and their streams, held to the types of OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.gateway.conftest import MODEL
from tests.server.gateway.tools import SCHEMAS, USER

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
FUNCTIONS: Any = [
    {"type": "function", "name": name, "parameters": schema, "strict": False}
    for name, schema in SCHEMAS.items()
]


def create(openai: OpenAI, **options: Any) -> Any:
    names = ("structured_outputs", "logit_bias", "ignore_eos", "user")
    extra = {name: options.pop(name) for name in names if name in options}
    asked = {"model": "ensemble", "input": USER["content"], "tools": FUNCTIONS}
    return openai.responses.create(**{**asked, **options}, extra_body=extra)


def checked(response: Any) -> dict[str, Any]:
    """Return a response as JSON, if it is strictly of OpenAI's type."""
    found: dict[str, Any] = response.to_dict(mode="json")
    Response.model_validate_json(json.dumps(found), strict=True)
    return found


def told(response: dict[str, Any]) -> dict[str, Any]:
    """Return what does not differ from one answer to the next of the same request."""
    own = ("id", "call_id", "created_at", "completed_at")
    output = [{k: v for k, v in item.items() if k not in own} for item in response["output"]]
    usage = {**response["usage"], "input_tokens_details": None}
    return {k: v for k, v in response.items() if k not in own} | {"output": output, "usage": usage}


def whole(events: list[Any]) -> dict[str, Any]:
    """Put a stream together, event by event, and return its response."""
    found = [event.to_dict(mode="json") for event in events]
    for raw in found:
        assert EVENT.validate_json(json.dumps(raw), strict=True).type == raw["type"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [e["type"] for e in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0]["response"]["output"] == []
    items: list[dict[str, Any]] = []
    for event in found[2:-1]:
        kind, item = event["type"].removeprefix("response."), items[-1] if items else {}
        if kind == "output_item.added":
            assert event["item"]["status"] == "in_progress"
            items.append({**event["item"], "has_ended": False})
        elif kind == "content_part.added":
            item["content"] = [event["part"]]
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][0]["text"] += event["delta"]
            item["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == item["content"][0]["text"]
            assert event.get("logprobs") == item["content"][0].get("logprobs")
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
        else:
            assert kind == "output_item.done"
            item |= {"has_ended": True, "status": event["item"]["status"]}
            assert {**event["item"], "has_ended": True} == item
        assert event["output_index"] == len(items) - 1
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
    response: dict[str, Any] = found[-1]["response"]
    assert found[-1]["type"] == f"response.{response['status']}"
    assert [{**item, "has_ended": True} for item in response["output"]] == items
    return response
