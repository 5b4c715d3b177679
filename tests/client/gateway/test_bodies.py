"""Bodies that are no JSON, or not sent as JSON, are refused with what is wrong."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.gateway.routes.json_route import num_containers
from client.gateway.schemas.limits import MAX_TOOLS
from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import FakeTriton
from tests.client.gateway.asking import ask
from tests.server.gateway.running import running

NEEDED: dict[str, bytes] = {
    "/v1/completions": b'"prompt": "a"',
    "/v1/chat/completions": b'"messages": [{"role": "user", "content": "a"}]',
    "/v1/responses": b'"input": "a"',
    "/v1/messages": b'"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]',
    "/tokenize": b'"prompt": "a"',
}


@pytest.fixture(scope="module")
def gateway(triton: FakeTriton) -> Iterator[str]:
    with running(GatewaySettings((triton.url,))) as address:
        yield address


@pytest.mark.parametrize("path", NEEDED)
@pytest.mark.parametrize(
    "member",
    [b'"user": "\\ud800"', b'"stop": ["\\udc00"]', b'"\\ud800": 1', b'"a": ' + b"[" * 10**4],
    ids=["text", "list", "name", "depth"],
)
def test_what_cannot_be_sent_on_is_refused(gateway: str, path: str, member: bytes) -> None:
    reply = ask(gateway, "POST", path, b"{%b, %b}" % (NEEDED[path], member))
    assert reply.status == 400
    assert reply.error["message"].startswith("the body is not valid JSON: ")
    assert " at line 1 column " in reply.error["message"]


MANY = [f"f{i}" for i in range(MAX_TOOLS + 1)]
OWN = [{"type": "function", "name": name} for name in MANY]
USER = {"role": "user", "content": "a"}
MESSAGES = {"model": "ensemble", "messages": [USER]}
INPUTS = [{"name": name, "input_schema": {}} for name in MANY]


@pytest.mark.parametrize(
    ("path", "body", "tools"),
    [
        (
            "/v1/chat/completions",
            {"messages": [USER]},
            [{"type": "function", "function": {"name": name}} for name in MANY],
        ),
        ("/v1/responses", {"input": "a"}, OWN),
        (
            "/v1/responses",
            {"input": "a"},
            [{"type": "namespace", "name": "n", "description": "d", "tools": OWN}],
        ),
        ("/v1/responses", {"input": "a"}, [{"type": "tool_search"} for _ in MANY]),
        ("/v1/messages", {**MESSAGES, "max_tokens": 1}, INPUTS),
        (
            "/v1/messages",
            {**MESSAGES, "max_tokens": 1},
            [{**i, "defer_loading": True} for i in INPUTS],
        ),
        ("/v1/messages/count_tokens", MESSAGES, INPUTS),
    ],
)
def test_more_tools_than_the_limit_are_refused(
    gateway: str, path: str, body: dict[str, Any], tools: list[dict[str, Any]]
) -> None:
    reply = ask(gateway, "POST", path, {**body, "tools": tools})
    assert reply.status == 400
    assert reply.error["message"] == "tools: has 1025 tools; at most 1024 are allowed"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
def test_another_type_is_refused_by_name(gateway: str, content_type: str) -> None:
    body = b'{"prompt": "a"}'
    for headers in ({"content_type": content_type}, {"content_type": ""}):
        reply = ask(gateway, "POST", "/v1/completions", body, **headers)
        assert (reply.status, reply.error["param"]) == (400, "content-type")
        assert reply.error["message"] == "content-type: must be application/json"


@pytest.mark.parametrize("path", NEEDED)
def test_a_compressed_body_is_refused_as_such(gateway: str, path: str) -> None:
    body = b"{%b}" % NEEDED[path]
    reply = ask(gateway, "POST", path, gzip.compress(body), content_encoding="gzip")
    assert reply.status == 400
    assert reply.error["message"] == "content-encoding: not supported: send the body uncompressed"


def test_a_mark_of_the_byte_order_is_skipped(gateway: str) -> None:
    body: Any = b'\xef\xbb\xbf{"prompt": "a", "stop": "\\ud83d\\ude00"}'
    assert ask(gateway, "POST", "/v1/completions", body).status == 200


def test_a_field_of_chats_is_named_where_there_is_no_chat(gateway: str) -> None:
    reply = ask(gateway, "POST", "/tokenize", {"prompt": "a", "add_generation_prompt": True})
    assert reply.error["message"] == "add_generation_prompt: needs messages"
    assert reply.error["param"] == "add_generation_prompt"


@pytest.mark.parametrize("path", NEEDED)
@pytest.mark.parametrize("member", [b'"a": [%b{}]' % (b"{}, " * 70_000), b'"a": ' + b"[" * 10**6])
def test_body_of_too_many_objects_is_refused(gateway: str, path: str, member: bytes) -> None:
    reply = ask(gateway, "POST", path, b"{%b, %b}" % (NEEDED[path], member))
    assert reply.status == 400
    assert "objects and lists; at most 65536 are allowed in one" in reply.error["message"]


def test_braces_in_texts_are_no_objects(gateway: str) -> None:
    body = {"prompt": '"{[\\' * 50_000}
    assert ask(gateway, "POST", "/v1/completions", body).status == 200


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_objects_of_a_body_are_counted(value: Any) -> None:
    def count(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value
        return 0 if isinstance(value, str) else 1 + sum(map(count, inner))

    for is_ascii in (True, False):
        body = json.dumps(value, ensure_ascii=is_ascii).encode(errors="replace")
        assert num_containers(body) == count(value)


@pytest.mark.parametrize(
    "body", [b'"' * 300_000, b'\\"' * 150_000, b'"\\' * 150_000, b'"a' * 150_000]
)
def test_count_of_objects_reads_what_is_no_json_once(body: bytes) -> None:
    started = time.process_time()
    num_containers(body)
    assert time.process_time() - started < 1  # a second of reading again and again is a minute


@pytest.mark.parametrize("part", [b'{"type":"item_reference","id":"msg_1"},', b'["[",', b'"",'])
def test_count_of_objects_many_strings_takes_little_memory(part: bytes) -> None:
    body = part * (2**20 // len(part))
    tracemalloc.start()
    try:
        num_containers(body)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(body)
    finally:
        tracemalloc.stop()
