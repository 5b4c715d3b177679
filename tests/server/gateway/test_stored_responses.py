"""Responses that were asked for with `store`, with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from tests.server.gateway.checked_responses import GREEDY, checked, create, told, whole
from tests.server.gateway.tools import USER

pytestmark = pytest.mark.server


def test_what_is_stored_can_be_got_listed_continued_and_dropped(
    tool_openai: OpenAI, saying: Any
) -> None:
    first = create(tool_openai, store=True, instructions="Be brief.", **saying)
    assert first.store  # type: ignore[attr-defined]
    call = first.output[2]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    begun: Any = {"instructions": "Be brief.", "max_output_tokens": 4, "temperature": 0}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    second = create(tool_openai, input=[result], previous_response_id=first.id, store=True, **begun)
    expected = told(checked(second) | {"previous_response_id": None, "store": False})
    for earlier in (first.output, references):
        again = create(tool_openai, input=[USER, *earlier, result], **begun)
        assert told(checked(again)) == expected
    for made in (first, second):
        assert checked(tool_openai.responses.retrieve(made.id)) == checked(made)
    items = tool_openai.responses.input_items.list(second.id, order="asc", limit=2)
    kinds = [item.type for item in items]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
    raw = [item.to_dict(mode="json") for item in items]
    TypeAdapter(list[ResponseItem]).validate_json(json.dumps(raw), strict=True)
    assert raw[0]["content"] == [{"type": "input_text", "text": USER["content"]}]
    listed: Any = [{"id": raw[0]["id"]}, *references]
    again = create(tool_openai, input=[*listed, result], **begun)
    assert told(checked(again)) == expected
    with_all: Any = {"include": ["reasoning.encrypted_content"]}
    assert checked(tool_openai.responses.retrieve(first.id, **with_all)) == checked(first)
    listing = tool_openai.responses.input_items.list(second.id, order="asc", limit=2, **with_all)
    assert [item.type for item in listing] == kinds
    assert [item.type for item in tool_openai.responses.input_items.list(second.id)] == kinds[::-1]
    tool_openai.responses.delete(first.id)
    for ask in (tool_openai.responses.retrieve, tool_openai.responses.delete):
        with pytest.raises(NotFoundError, match="there is no response"):
            ask(first.id)
    with pytest.raises(BadRequestError) as caught:
        create(tool_openai, previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    with pytest.raises(BadRequestError, match="there is no item"):
        create(tool_openai, input=references)
    assert create(tool_openai, previous_response_id=second.id, input="So?", **begun).output


def test_a_stream_is_stored_too(openai: OpenAI) -> None:
    events = list(openai.responses.create(**GREEDY, input="Hi", store=True, stream=True))
    response = whole(events)
    assert response["store"]
    assert checked(openai.responses.retrieve(response["id"])) == response
    path = f"/responses/{response['id']}"
    for query, param in (("?stream=true", "stream"), ("/input_items?limit=0", "limit"),
                         ("/input_items?after=x", "after"), ("?x=1", "x")):  # fmt: skip
        with pytest.raises(BadRequestError) as caught:
            openai.get(path + query, cast_to=object)
        assert caught.value.param == param
