"""A response whose server fails, and a gateway that keeps none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from openai import OpenAI

from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import FakeTriton, Piece
from tests.client.gateway.asking import ask
from tests.server.gateway.running import running

HELLO = Piece({0: "Hello"})
END = Piece({0: ""}, reasons=("abort",), final=True)


@pytest.fixture(scope="module")
def gateway(triton: FakeTriton) -> Iterator[str]:
    with running(GatewaySettings((triton.url,), max_stored_responses=0)) as address:
        yield address


@pytest.fixture
def openai(gateway: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_error_in_a_stream_is_an_event_and_the_response_has_failed(
    openai: OpenAI, triton: FakeTriton
) -> None:
    triton.pieces = [HELLO]
    triton.error = (grpc.StatusCode.INTERNAL, "it broke")
    *_, error, failed = list(openai.responses.create(model="ensemble", input="a", stream=True))
    triton.error = None
    assert (error.type, failed.type) == ("error", "response.failed")
    assert "it broke" in error.message
    assert failed.sequence_number == error.sequence_number + 1
    response = failed.response
    assert (response.status, response.error.code) == ("failed", "server_error")  # type: ignore[union-attr]
    [message] = response.output
    assert (message.status, response.output_text) == ("incomplete", "Hello")  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_was_ended_has_failed(
    openai: OpenAI, triton: FakeTriton, stream: bool
) -> None:
    triton.pieces = [HELLO, END]
    answer: Any = openai.responses.create(model="ensemble", input="a", stream=stream)
    response = list(answer)[-1].response if stream else answer
    assert (response.status, response.output_text) == ("failed", "Hello")
    assert "ended from outside" in response.error.message


def test_a_gateway_may_keep_none(gateway: str) -> None:
    reply = ask(gateway, "POST", "/v1/responses", {"input": "a", "store": True})
    assert (reply.status, reply.error["param"]) == (400, "store")
    assert ask(gateway, "GET", "/v1/responses/resp_1").status == 404


def test_a_refused_request_is_no_stream(gateway: str, triton: FakeTriton) -> None:
    refusal = "messages: are wrong [code=invalid_value param=messages]"
    triton.pieces, triton.error = [], (grpc.StatusCode.INVALID_ARGUMENT, refusal)
    body = {"input": "a", "stream": True}
    reply = ask(gateway, "POST", "/v1/responses", body)
    triton.error = None
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert json.loads(reply.body)["error"]["message"] == "input: are wrong"
