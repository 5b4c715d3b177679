"""Errors of the gateway: a code for each kind, and the first fault alone of very many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from client.errors import InvalidRequestError, UnsupportedRequestError
from client.gateway.anthropic.protocol import MessagesRequest
from client.gateway.errors import fault_of, from_client
from client.gateway.openai.protocol import ChatRequest, CompletionRequest, EmbeddingsRequest
from client.gateway.responses.protocol import ResponseRequest
from client.gateway.schemas.sampling import Fields
from client.gateway.schemas.tokens import DetokenizeRequest
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


MANY = 1000
USER = {"role": "user", "content": "a"}
MESSAGES = {"model": "m", "max_tokens": 1}


def numbered(value: Any, numbers: Iterable[int] = range(MANY)) -> dict[str, Any]:
    return {str(number): value for number in numbers}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (EmbeddingsRequest, {"input": [1, 2, *["a"] * MANY]}, "input[2]"),
        (EmbeddingsRequest, {"input": [["a"]] * MANY}, "input[0][0]"),
        (CompletionRequest, {"prompt": [None] * MANY}, "prompt[0]"),
        (CompletionRequest, {"prompt": "a", "stop": ["a", *range(200)]}, "stop[1]"),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * MANY}, "stop_token_ids[0]"),
        (CompletionRequest, {"prompt": "a", "logit_bias": numbered("x")}, "logit_bias.0"),
        (CompletionRequest, {"prompt": "a", **numbered(1)}, "0"),
        (ChatRequest, {"messages": [USER, *range(MANY)]}, "messages[1]"),
        (ChatRequest, {"messages": [USER], "metadata": numbered(1)}, "metadata.0"),
        (ChatRequest, {"messages": [USER], "stream_options": numbered(1)}, "stream_options.0"),
        (ResponseRequest, {"input": [USER, *[{}] * MANY]}, "input[1]"),
        (
            ResponseRequest,
            {"input": [{"role": "user", "content": [{}] * MANY}]},
            "input[0].content[0]",
        ),
        (ResponseRequest, {"input": "a", "metadata": numbered(1, range(16))}, "metadata.0"),
        (ResponseRequest, {"input": "a", "tools": [{}] * MANY}, "tools[0]"),
        (MessagesRequest, {**MESSAGES, "messages": [USER, *range(MANY)]}, "messages[1]"),
        (
            MessagesRequest,
            {**MESSAGES, "messages": [{"role": "user", "content": [{}] * MANY}]},
            "messages[0].content[0]",
        ),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}, "tokens[0]"),
    ],
)
def test_one_fault_is_told(kind: type[Fields], body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert fault_of(caught.value.errors()).param == param
    assert caught.value.error_count() == 1
