"""Fields that say no more than what holds anyway change nothing; others are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import FakeTriton
from tests.client.gateway.asking import ask
from tests.server.gateway.running import running

USER = {"role": "user", "content": "a"}
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"model": "ensemble", "max_tokens": 1, "messages": [USER]},
    "/tokenize": {"prompt": "a"},
}
CHAT = "/v1/chat/completions"
VLLMS = {"return_token_ids": False, "detokenize": True, "request_id": "mine"}


@pytest.fixture(scope="module")
def gateway(triton: FakeTriton) -> Iterator[str]:
    with running(GatewaySettings((triton.url,))) as address:
        yield address


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, VLLMS) for path in ("/v1/completions", CHAT, "/v1/responses")),
        (CHAT, {"add_special_tokens": False, "include_reasoning": True, "echo": False}),
        (CHAT, {"metadata": {"a": "b"}, "verbosity": "medium"}),
        ("/v1/completions", {"add_special_tokens": True}),
        *((path, {"unheard_of": None}) for path in NEEDED if path != "/tokenize"),
        ("/v1/responses", {"text": {"unheard_of": None}, "tools": [], "max_tool_calls": None}),
        ("/v1/messages", {"messages": [{**USER, "unheard_of": None}]}),
    ],
)
def test_what_changes_nothing_is_taken(
    gateway: str, triton: FakeTriton, path: str, fields: dict[str, Any]
) -> None:
    asked = []
    for body in (NEEDED[path], {**NEEDED[path], **fields}):
        reply = ask(gateway, "POST", path, body)
        assert reply.status == 200, reply.body
        asked.append(triton.requests[-1])
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, {"return_token_ids": True}) for path in ("/v1/completions", CHAT)),
        *((CHAT, {name: True}) for name in ("add_special_tokens", "echo")),
        *((path, {"detokenize": 1}) for path in ("/v1/completions", CHAT, "/v1/responses")),
        (CHAT, {"store": 0}),
        *((CHAT, {name: False}) for name in ("include_reasoning", "detokenize")),
        (CHAT, {"verbosity": "low"}),
        ("/v1/completions", {"add_special_tokens": False}),
        *((path, {"unheard_of": False}) for path in NEEDED),
    ],
)
def test_what_would_have_an_effect_is_refused(
    gateway: str, path: str, fields: dict[str, Any]
) -> None:
    reply = ask(gateway, "POST", path, {**NEEDED[path], **fields})
    assert reply.status == 400
    assert str(reply.error["message"]).startswith(f"{next(iter(fields))}: ")


@pytest.mark.parametrize("path", NEEDED)
def test_null_is_absent_also_where_something_is_needed(gateway: str, path: str) -> None:
    *_, name = NEEDED[path]
    reply = ask(gateway, "POST", path, {**NEEDED[path], name: None})
    assert reply.status == 400
