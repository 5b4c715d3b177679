"""What nests up to millions of levels in a body, an answer or a file ends nothing but itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from client import ConfigurationError, ServerError, TridentClientError
from client.gateway.security.body_limits import MAX_BODY_BYTES
from client.gateway.security.tenants import read_tenants
from client.gateway.settings import GatewaySettings
from client.gateway.tool_parsers.registry import TOOL_PARSERS
from client.gateway_client import GatewayClient
from client.response import read_chunks, read_health
from tests.client.fake_triton import HELLO, FakeTriton, serve
from tests.client.gateway.asking import ask
from tests.client.gateway.tool_parsers.answers import read, tool_call
from tests.server.gateway.running import running

DEPTHS = (100, 180, 1_000, 100_000, 1_000_000)
BRACKETS = (("[", "]"), ('{"a":', "}"))
BOTH = pytest.mark.parametrize("brackets", BRACKETS, ids=["lists", "objects"])
AT_DEPTH = pytest.mark.parametrize("depth", DEPTHS)


def nested(depth: int, brackets: tuple[str, str]) -> str:
    return brackets[0] * depth + "1" + brackets[1] * depth


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    servicer = FakeTriton(pieces=HELLO)
    server, servicer.url = serve(servicer)
    with running(GatewaySettings((servicer.url,))) as address:
        yield address
    server.stop(grace=None).wait()


HOLE = "HOLE"  # in a body, for what nests
PARAMETERS = {"type": "object", "properties": {"x": {"enum": [HOLE]}}}
USER: dict[str, Any] = {"role": "user", "content": "a"}
CHAT: dict[str, Any] = {"messages": [USER]}
MESSAGES: dict[str, Any] = {"max_tokens": 1, **CHAT}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": HOLE}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "a"}
TOOL = {"name": "f", "parameters": PARAMETERS}
SCHEMA = {"name": "f", "schema": HOLE}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown field": ("/v1/completions", {"prompt": "a", "x": HOLE}),
    "schema": ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": HOLE}}),
    "bias": ("/v1/completions", {"prompt": "a", "logit_bias": HOLE}),
    "prompt": ("/v1/completions", {"prompt": HOLE}),
    "content": ("/v1/chat/completions", {"messages": [{"role": "user", "content": HOLE}]}),
    "tool": ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": TOOL}]}),
    "kwargs": ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"a": HOLE}}),
    "format": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    ),
    "input": ("/v1/responses", {"input": HOLE}),
    "text": ("/v1/responses", {"input": "a", "text": HOLE}),
    "stored": ("/v1/responses", {"input": "a", "tools": [{"type": "function", **TOOL}]}),
    "blocks": ("/v1/messages", {"max_tokens": 1, "messages": [{**USER, "content": HOLE}]}),
    "tool use": (
        "/v1/messages",
        {
            "max_tokens": 1,
            "messages": [
                USER,
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [RESULT]},
            ],
        },
    ),
    "tool of messages": (
        "/v1/messages",
        {**MESSAGES, "tools": [{"name": "f", "input_schema": PARAMETERS}]},
    ),
    "tokens": ("/tokenize", {"prompt": "a", "x": HOLE}),
    "vectors": ("/v1/embeddings", {"input": HOLE}),
}


@AT_DEPTH
@BOTH
@pytest.mark.parametrize("name", BODIES)
def test_body_that_is_nested_is_answered_or_refused(
    gateway: str, name: str, brackets: tuple[str, str], depth: int
) -> None:
    route, body = BODIES[name]
    text = json.dumps(body).replace(f'"{HOLE}"', nested(depth, brackets))
    reply = ask(gateway, "POST", route, text.encode())
    assert reply.status in (200, 400, 413, 501), reply.body[:500]
    assert reply.status != 200 or depth < 200


@BOTH
@pytest.mark.parametrize("name", BODIES)
def test_body_nested_as_deep_as_its_size_allows_is_refused(
    gateway: str, name: str, brackets: tuple[str, str]
) -> None:
    route, body = BODIES[name]
    depth = (MAX_BODY_BYTES - 500) // len("".join(brackets))
    text = json.dumps(body).replace(f'"{HOLE}"', nested(depth, brackets))
    reply = ask(gateway, "POST", route, text.encode())
    assert reply.status in (400, 501), reply.body[:500]


@AT_DEPTH
@BOTH
@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_call_of_a_model_that_is_nested_ends_nothing(
    form: str, brackets: tuple[str, str], depth: int
) -> None:
    value = nested(min(depth, 20_000), brackets)
    begin, end = "<function=get_weather>\n<parameter=", "\n</parameter>\n</function>"
    texts = {
        "pythonic": f"get_weather(city={value})",
        "llama4_pythonic": f"[get_weather(city={value})]",
        "qwen3_coder": f"{begin}at>\n{value}{end}",
        "qwen3_xml": f"{begin}tags>\n{value}{end}",
        "openai": value,
    }
    text = texts.get(form, f'{{"name": "get_weather", "arguments": {{"city": {value}}}}}')
    tag = "commentary to=functions.get_weather" if form == "openai" else "<tool_call>"
    answer = read(TOOL_PARSERS[form], [[tool_call(text, tag=tag)]])
    assert answer.finish_reason == ("tool_calls" if answer.calls else "stop")
    assert answer.calls or text in answer.content


class Answering(BaseHTTPRequestHandler):
    """A gateway whose answers nest."""

    depth = 0
    status = 200

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        text = nested(self.depth, BRACKETS[1]).encode()
        body = text if self.path.startswith("/health") else b"data: " + text + b"\n\n"
        self.send_response(self.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 (the base's names)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@AT_DEPTH
@pytest.mark.parametrize("status", [200, 400])
def test_answer_of_a_gateway_that_is_nested_is_an_error_of_the_server(
    web: str, depth: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answering, "depth", depth)
    monkeypatch.setattr(Answering, "status", status)
    client = GatewayClient(web, retry=None)
    with pytest.raises(TridentClientError):
        client.health(timeout=20)
    with pytest.raises(ServerError):
        list(client.stream("a", timeout=20))


@AT_DEPTH
@BOTH
@pytest.mark.parametrize(
    "name", ["health", "logprobs", "sections", "prompt_logprobs", "stop_reason"]
)
def test_answer_of_a_server_that_is_nested_is_an_error_of_the_server(
    name: str, brackets: tuple[str, str], depth: int
) -> None:
    content = nested(depth, brackets).encode()
    response = service_pb2.ModelInferResponse()
    for each, value in {"text_output": b"a", name: content}.items():
        response.outputs.add(name=each, datatype="BYTES", shape=[1, 1])
        response.raw_output_contents.append(len(value).to_bytes(4, "little") + value)
    with pytest.raises(ServerError):
        list((read_health if name == "health" else read_chunks)(response))


@AT_DEPTH
@pytest.mark.parametrize("brackets", [("[", "]"), ("{a=", "}")], ids=["lists", "tables"])
def test_file_of_keys_that_is_nested_is_refused(
    tmp_path: Path, brackets: tuple[str, str], depth: int
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f"a = {nested(min(depth, 100_000), brackets)}\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"^api_key_file: .*keys\.toml: "):
        read_tenants((), file)
