"""What requests for responses ask of a scripted server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from openai.types.responses import Response

from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import Answer, FakeTriton, Piece
from tests.client.gateway.asking import Reply, ask
from tests.server.gateway.running import running


@pytest.fixture(scope="module")
def gateway(triton: FakeTriton) -> Iterator[str]:
    triton.health = '{"state": "ready", "tool_call_parser": "hermes"}'
    with running(GatewaySettings((triton.url,))) as address:
        yield address


def respond(gateway: str, **fields: Any) -> Reply:
    return ask(gateway, "POST", "/v1/responses", {"input": "Hi", **fields})


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None}])
def test_without_tools_auto_is_free_text(gateway: str, fields: dict[str, Any]) -> None:
    reply = respond(gateway, tool_choice="auto", **fields)
    assert reply.status == 200, reply.body
    assert json.loads(reply.body)["tool_choice"] == "auto"
    assert respond(gateway, tool_choice="required", **fields).error["param"] == "tool_choice"


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
GROUP = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{"type": "function", "name": "find", "description": "By name.", "strict": False}],
}
CODEX: dict[str, Any] = {
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": None, "summary": "auto"},
    "client_metadata": {"x-codex-installation-id": "x"},
    "prompt_cache_key": "x",
    "service_tier": None,
}


def offered(triton: FakeTriton) -> list[dict[str, Any]]:
    tools = json.loads(triton.requests[-1]["chat_parameters"])["tools"]
    return [tool["function"] for tool in tools]


def test_what_the_server_would_have_to_run_is_left_out(gateway: str, triton: FakeTriton) -> None:
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "local_shell"}]
    reply = respond(gateway, **CODEX, tools=[hosted[0], FUNCTION, hosted[1]])
    assert reply.status == 200, reply.body
    assert [function["name"] for function in offered(triton)] == ["f"]
    response = json.loads(reply.body)
    assert [tool["name"] for tool in response["tools"]] == ["f"]
    assert response["reasoning"] == {"effort": None, "summary": "auto"}
    assert respond(gateway, tools=hosted).status == 200
    refused = respond(gateway, tools=[FUNCTION, *hosted], tool_choice="required")
    assert (refused.status, refused.error["param"]) == (400, "tools[1]")
    assert "'web_search' is not supported" in refused.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace_are_called_by_both_names(
    gateway: str, triton: FakeTriton, stream: bool
) -> None:
    call = '{"name": "crm.find", "arguments": {"q": 1}}'
    triton.first = [Answer([Piece({0: call}, (0,), final=True, section=(1, "tool_call"))])]
    reply = respond(gateway, **CODEX, tools=[FUNCTION, GROUP], stream=stream)
    assert reply.status == 200, reply.body
    plain, grouped = offered(triton)
    assert plain["name"] == "f"
    assert (grouped["name"], grouped["description"]) == ("crm.find", "Customers.\nBy name.")
    if stream:
        *_, last, _ = reply.body.decode().strip().split("\n\n")
        response = json.loads(last.split("data: ")[1])["response"]
        assert reply.body.count(b'"namespace":"crm"') == 3  # added, done, completed
    else:
        response = json.loads(reply.body)
    typed = Response.model_validate_json(json.dumps(response), strict=True)
    assert [tool.type for tool in typed.tools] == ["function", "namespace"]
    [item] = response["output"]
    assert (item["name"], item["namespace"], item["arguments"]) == ("find", "crm", '{"q": 1}')

    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
    assert respond(gateway, input=[item, result], tools=[GROUP]).status == 200
    [said, _] = json.loads(triton.requests[-1]["messages"])
    assert said["tool_calls"][0]["function"]["name"] == "crm.find"


@pytest.mark.parametrize(
    ("param", "named"),
    [
        ("tools[0].function.name", "tools[1].name"),
        ("tools[1].function.parameters", "tools[2].tools[0].parameters"),
        ("tools[7].function.name", "tools[7].name"),
    ],
)
def test_errors_name_the_tools_of_the_request(
    gateway: str, triton: FakeTriton, param: str, named: str
) -> None:
    refusal = f"{param}: is wrong [code=invalid_value param={param}]"
    triton.first = [Answer(error=(grpc.StatusCode.INVALID_ARGUMENT, refusal))]
    reply = respond(gateway, tools=[{"type": "web_search"}, FUNCTION, GROUP])
    assert (reply.status, reply.error["param"]) == (400, named)
    assert str(reply.error["message"]).startswith(f"{named}: ")


def test_reasoning_comes_back_beside_its_encrypted_copy(gateway: str, triton: FakeTriton) -> None:
    text = {"type": "reasoning_text", "text": "h"}
    thought = {"type": "reasoning", "summary": [], "content": [text], "encrypted_content": "x"}
    said = {"role": "assistant", "content": "a"}
    user = {"role": "user", "content": "b"}
    assert respond(gateway, input=[thought, said, user]).status == 200
    assert json.loads(triton.requests[-1]["messages"])[0]["reasoning_content"] == "h"
    alone = {**thought, "content": None}
    reply = respond(gateway, input=[user, alone])
    assert (reply.status, reply.error["param"]) == (400, "input[1].encrypted_content")


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom", "name": "c"}, "tools[0]"),
        ({**GROUP, "tools": [{"type": "custom", "name": "c"}]}, "tools[0].tools[0]"),
        ({**FUNCTION, "x": 1}, "tools[0].x"),
    ],
)
def test_other_tools_are_refused_by_name(gateway: str, tool: dict[str, Any], param: str) -> None:
    reply = respond(gateway, tools=[tool])
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("arguments", "end", "reason"),
    [
        ('{"city": "Zü', "", "length"),
        ('{"city": "a\nb"}', "}", "stop"),
        ('{"city": "\\d"}', "}", "stop"),
    ],
)
def test_call_with_broken_arguments_is_continued_as_the_model_wrote_it(
    gateway: str, triton: FakeTriton, arguments: str, end: str, reason: str
) -> None:
    """By the id of its response, and by that of the item."""
    text = f'{{"name": "f", "arguments": {arguments}{end}'
    last = Piece({0: ""}, finished=(0,), final=True, section=(0, "tool_call"), reasons=(reason,))
    triton.first = [Answer([Piece({0: text}, section=(0, "tool_call")), last])]
    first = respond(gateway, tools=[FUNCTION], store=True)
    [call] = json.loads(first.body)["output"]
    assert call["arguments"] == arguments
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "dry"}
    asked: dict[str, Any] = {"tools": [FUNCTION], "input": [result]}
    for begun in (
        {"previous_response_id": json.loads(first.body)["id"]},
        {"input": [{"role": "user", "content": "Hi"}, {"id": call["id"]}, result]},
    ):
        reply = respond(gateway, **{**asked, **begun})
        assert reply.status == 200, reply.body
        user, said, returned = json.loads(triton.requests[-1]["messages"])
        assert [user["role"], said["role"], returned["role"]] == ["user", "assistant", "tool"]
        assert said["tool_calls"][0]["function"]["arguments"] == arguments
