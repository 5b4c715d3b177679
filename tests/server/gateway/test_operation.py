"""Health, models, metrics, errors that are not about one route."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from client.gateway.settings import GatewaySettings
from engine.launch.ports import pick_free
from engine.launch.server import TritonServer
from tests.server.gateway.conftest import MODEL
from tests.server.gateway.running import running
from tests.waiting import eventually

pytestmark = pytest.mark.server


def call(
    address: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """Return status, JSON (or text) and headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://{address}{path}", body, named)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, text, found = response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            status, text, found = error.code, error.read().decode(), error.headers
    is_json = found.get("content-type", "").startswith("application/json")
    return status, json.loads(text) if is_json else text, {k.lower(): v for k, v in found.items()}


def post(address: str, path: str, body: Any) -> tuple[int, Any, dict[str, str]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return call(address, path, data, content_type="application/json")


def test_health_and_version(gateway: str) -> None:
    assert call(gateway, "/health")[:2] == (200, {"status": "ok"})
    status, body, _ = call(gateway, "/health/ready")
    assert (status, body["status"]) == (200, "ready")
    assert call(gateway, "/version")[1]["version"]
    assert "swagger" in call(gateway, "/docs")[1]


def test_models(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL, "alias"]
    assert openai.models.retrieve(MODEL).id == MODEL  # with a slash
    with pytest.raises(NotFoundError) as caught:
        openai.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_metrics_are_the_servers_and_its_own(gateway: str) -> None:
    post(gateway, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    status, text, _ = call(gateway, "/metrics")
    assert status == 200
    found = {
        sample.name: sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert "vllm:num_requests_running" in found
    assert found["trident:gateway_server_metrics_up"].value == 1
    assert found["trident:gateway_requests_in_flight"].value == 1  # this one
    counted = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "trident:gateway_requests_total"
        and sample.labels == {"route": "/v1/completions", "status": "200"}
    ]
    assert counted
    assert counted[0] >= 1


def test_each_request_has_an_id_and_a_line_in_the_log_without_its_text(
    gateway: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trident.gateway"):
        body = json.dumps({"prompt": "secret words", "max_tokens": 1}).encode()
        _, _, headers = call(
            gateway,
            "/v1/completions?key=secret",
            body,
            content_type="application/json",
            x_request_id="mine-1",
        )
        assert eventually(lambda: "mine-1" in caplog.text)  # it is written after the answer
    assert headers["x-request-id"] == "mine-1"
    assert len(call(gateway, "/health", x_request_id="not mine")[2]["x-request-id"]) == 32
    (line,) = [record.message for record in caplog.records if "mine-1" in record.message]
    assert line.startswith("POST /v1/completions 200 ")
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/nothing", {}, 404, "there is no /v1/nothing"),
        ("/chat/completions", {}, 404, "; did you mean /v1/chat/completions?"),
        ("/health", {}, 405, "Method Not Allowed"),
        ("/v1/completions", b"{", 400, "the body is not valid JSON"),
        ("/v1/completions", b"[]", 400, "the body must be a JSON object"),
        ("/v1/completions", b'{"prompt": "a", "top_p": Infinity}', 400, "top_p: "),
        ("/v1/completions", b"", 400, "the body must be a JSON object"),
    ],
)
def test_errors_have_openais_form(
    gateway: str, path: str, body: Any, status: int, text: str
) -> None:
    got, answer, headers = post(gateway, path, body)
    assert got == status
    assert text in answer["error"]["message"]
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert headers["x-request-id"]


def test_a_model_that_the_server_does_not_have_is_no_fault_of_the_client(
    server: TritonServer,
) -> None:
    settings = GatewaySettings((server.grpc_url,), triton_model="nothing")
    with running(settings) as address:
        status, answer, _ = post(address, "/v1/completions", {"prompt": "a"})
        assert status == 503
        assert "see --served-model-name of the gateway" in answer["error"]["message"]


def test_a_gateway_without_a_server_says_so() -> None:
    (port,) = pick_free(1)
    settings = GatewaySettings((f"127.0.0.1:{port}",), metrics_urls=(f"127.0.0.1:{port}",))
    with running(settings) as address:
        assert call(address, "/health")[0] == 200
        missing = f'trident:gateway_server_metrics_up{{server="127.0.0.1:{port}"}} 0.0'
        assert missing in call(address, "/metrics")[1]
        for status, answer, headers in (
            call(address, "/health/ready"),
            post(address, "/v1/completions", {"prompt": "a", "stream": True}),
        ):
            assert status == 503
            assert answer["error"]["code"] == "unavailable"
            assert headers["retry-after"] == "1"
