"""What requests for responses ask of a scripted server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import FakeTriton
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
