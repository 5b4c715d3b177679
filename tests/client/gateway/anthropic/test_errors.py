"""Errors of Anthropic's routes, wherever they come from, as Anthropic's client reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import grpc
import pytest
from anthropic import Anthropic, APIStatusError
from anthropic.types import ErrorResponse

from client.gateway.security.tenants import Tenant, Tenants
from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import HELLO, Answer, FakeTriton, Piece
from tests.client.gateway.asking import Reply, ask
from tests.server.gateway.running import running

USER = {"role": "user", "content": "a"}
COUNT: dict[str, Any] = {"model": "m", "messages": [USER]}
BODY: dict[str, Any] = {**COUNT, "max_tokens": 9}
FULL = "the queue is full [code=queue_full]"


@pytest.fixture(scope="module")
def gateway(triton: FakeTriton) -> Iterator[str]:
    tenants = Tenants(
        [
            Tenant("free", (hashlib.sha256(b"free").digest(),)),
            Tenant("rare", (hashlib.sha256(b"rare").digest(),), requests_per_minute=1),
        ]
    )
    settings = GatewaySettings((triton.url,), tenants=tenants, model_names=("m",))
    with running(settings) as address:
        yield address


@pytest.fixture(scope="module")
def client(gateway: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=f"http://{gateway}", api_key="free", max_retries=0) as made:
        yield made


def post(gateway: str, body: Any, path: str = "/v1/messages", key: str = "free") -> Reply:
    return ask(gateway, "POST", path, body, x_api_key=key)


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "kind", "text"),
    [
        ("", BODY, "none", 401, "authentication_error", "the API key is not valid"),
        ("/count_tokens", BODY, "none", 401, "authentication_error", "the API key is not valid"),
        (
            "",
            {**BODY, "model": "x"},
            "free",
            404,
            "not_found_error",
            "the model 'x' does not exist",
        ),
        (
            "/count_tokens",
            {**COUNT, "model": "x"},
            "free",
            404,
            "not_found_error",
            "model 'x' does not exist",
        ),
        ("/batches", BODY, "free", 404, "not_found_error", "there is no /v1/messages/batches"),
        ("", {**BODY, "x": 1}, "free", 400, "invalid_request_error", "x: unknown field"),
        ("/count_tokens", {**BODY, "x": 1}, "free", 400, "invalid_request_error", "max_tokens: u"),
        ("", b"{", "free", 400, "invalid_request_error", "the body is not valid JSON"),
        ("", b" " * 10_500_000, "free", 413, "request_too_large", "10485760 bytes"),
    ],
)
def test_each_has_its_type(
    gateway: str, path: str, body: Any, key: str, status: int, kind: str, text: str
) -> None:
    reply = post(gateway, body, f"/v1/messages{path}", key)
    body = json.loads(reply.body)
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert (reply.status, body["error"]["type"]) == (status, kind)
    assert text in body["error"]["message"]
    if kind != "request_too_large":  # Anthropic documents it, but has no type for it
        ErrorResponse.model_validate(body, strict=True)


def test_limits_of_a_key(gateway: str, triton: FakeTriton) -> None:
    replies = [post(gateway, BODY, key="rare") for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 429]
    assert replies[1].error["type"] == "rate_limit_error"
    assert 50 < int(replies[1].headers["retry-after"]) <= 60


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "error", "kind"),
    [
        (Answer(error_message=FULL), anthropic.RateLimitError, "rate_limit_error"),
        (
            Answer(error=(grpc.StatusCode.UNAVAILABLE, "restarting")),
            anthropic.InternalServerError,
            "overloaded_error",
        ),
        (Answer(error=(grpc.StatusCode.INTERNAL, "x")), anthropic.InternalServerError, "api_error"),
        (
            Answer([Piece({0: "a"}, (0,), final=True, reasons=("abort",))]),
            anthropic.InternalServerError,
            "api_error",
        ),
    ],
    ids=["full", "away", "failed", "ended"],
)
def test_the_servers_own(
    client: Anthropic,
    triton: FakeTriton,
    answer: Answer,
    error: type[APIStatusError],
    kind: str,
    stream: bool,
) -> None:
    triton.first = [answer]
    with pytest.raises(APIStatusError) as caught:
        list(client.messages.create(**BODY, stream=stream))
    assert caught.value.type == kind
    assert isinstance(caught.value, error) or answer.pieces


@pytest.mark.parametrize(
    ("figures", "size"), [("num_tokens=9", "9"), ("more_than=20", "more than 20")]
)
def test_error_prompt_too_long_is_in_anthropics_words(
    gateway: str, triton: FakeTriton, figures: str, size: str
) -> None:
    refusal = (
        f"text_input: no [code=context_length_exceeded param=text_input max_model_len=8 {figures}]"
    )
    triton.first = [Answer(error=(grpc.StatusCode.INVALID_ARGUMENT, refusal))]
    reply = post(gateway, BODY)
    assert reply.status == 400
    assert reply.error["message"] == f"prompt is too long: {size} tokens > 8 maximum"


def test_an_error_in_a_stream_is_its_last_event(gateway: str, triton: FakeTriton) -> None:
    triton.first = [Answer([Piece({0: "Hel"})], error_message="it broke")]
    reply = post(gateway, {**BODY, "stream": True})
    assert reply.status == 200
    *events, last, end = reply.body.decode().split("\n\n")
    assert end == ""
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    assert names == ["message_start", "ping", "content_block_start", "content_block_delta"]
    name, data = last.split("\ndata: ")
    error = ErrorResponse.model_validate(json.loads(data), strict=True)
    assert (name, error.error.type) == ("event: error", "api_error")
    assert error.request_id == reply.headers["request-id"]


def test_an_answer_ends_where_the_context_does(client: Anthropic, triton: FakeTriton) -> None:
    refusal = "max_tokens: too many [code=context_length_exceeded param=max_tokens]"
    cut = Piece({0: "Hel"}, (0,), final=True, reasons=("length",))
    triton.first = [Answer(error=(grpc.StatusCode.INVALID_ARGUMENT, refusal)), Answer([cut])]
    assert client.messages.create(**BODY).stop_reason == "model_context_window_exceeded"
    assert [asked["sampling_parameters"].get("max_tokens") for asked in triton.requests[-2:]] == [
        9,
        None,
    ]
    triton.first = [Answer([cut])]
    assert client.messages.create(**BODY).stop_reason == "max_tokens"
    assert triton.pieces is HELLO
