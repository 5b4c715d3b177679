"""The code of an error says what kind it is, whether this gateway finds it or the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from client.errors import InvalidRequestError, UnsupportedRequestError
from client.gateway.errors import from_client
from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import FakeTriton
from tests.client.gateway.asking import ask
from tests.server.gateway.running import running

CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def gateway(triton: FakeTriton) -> Iterator[str]:
    with running(GatewaySettings((triton.url,))) as address:
        yield address


@pytest.mark.parametrize(
    ("error", "param", "code"),
    [
        (InvalidRequestError("too small (got 0)", param="n"), "n", "invalid_value"),
        (
            InvalidRequestError("no", param="messages[0].a", code="unknown_parameter"),
            "messages[0].a",
            "unknown_parameter",
        ),
        (UnsupportedRequestError("no", param="n"), "n", "unsupported"),
        (
            InvalidRequestError("long", param="text_input", code="context_length_exceeded"),
            "prompt",
            "context_length_exceeded",
        ),
    ],
)
def test_of_the_server(error: InvalidRequestError, param: str, code: str) -> None:
    found = from_client(error)
    assert (found.status, found.param, found.code) == (400, param, code)


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/responses", {"input": "a", "background": True}, "unsupported"),
        ("/v1/responses", {"input": "a", "truncation": "auto"}, "unsupported"),
        ("/v1/chat/completions", {**CHAT, "store": True}, "unsupported"),
        ("/v1/chat/completions", {**CHAT, "echo": True}, "unsupported"),
        ("/v1/chat/completions", {**CHAT, "a": True}, "unknown_parameter"),
        ("/v1/completions", {"prompt": 5}, "invalid_value"),
    ],
)
def test_of_the_gateway(gateway: str, path: str, body: dict[str, Any], code: str) -> None:
    reply = ask(gateway, "POST", path, body)
    assert (reply.status, reply.error["code"]) == (400, code)
