"""`/tokenize` and `/detokenize`, and the same by our own clients."""

from __future__ import annotations

from typing import Any

import pytest

from engine.launch.server import TritonServer
from tests.client.clients import BOTH
from tests.factories.tokenizers import byte_level_tokenizer
from tests.server.conftest import MAX_MODEL_LEN
from tests.server.gateway.test_operation import post

pytestmark = pytest.mark.server

TOKENIZER = byte_level_tokenizer()
TEXT = "Where is it? 你好 😀"
USER = {"role": "user", "content": TEXT}
CHAT = f"<|user|>{TEXT}<|end|>"


def test_there_and_back(gateway: str) -> None:
    expected = TOKENIZER.encode(TEXT)
    status, found, _ = post(gateway, "/tokenize", {"prompt": TEXT})
    assert (status, found) == (
        200,
        {
            "count": len(expected),
            "max_model_len": MAX_MODEL_LEN,
            "tokens": expected,
            "token_strs": None,
        },
    )
    assert post(gateway, "/detokenize", {"tokens": expected})[1] == {"prompt": TEXT}
    assert post(gateway, "/detokenize", {"tokens": []})[1] == {"prompt": ""}


def test_a_chat_is_what_the_template_makes_of_it(gateway: str) -> None:
    def tokens(**fields: Any) -> list[int]:
        status, found, _ = post(gateway, "/tokenize", {"messages": [USER], **fields})
        assert status == 200, found
        return found["tokens"]

    assert tokens() == TOKENIZER.encode(f"{CHAT}<|assistant|>")
    assert tokens(add_generation_prompt=False) == TOKENIZER.encode(CHAT)
    text = post(gateway, "/detokenize", {"tokens": tokens()})[1]["prompt"]
    assert text == f"{CHAT}<|assistant|>"


def test_the_text_of_each_token(gateway: str) -> None:
    body = {"prompt": "Stop here", "return_token_strs": True}
    found = post(gateway, "/tokenize", body)[1]
    assert "".join(found["token_strs"]) == "Stop here"
    assert len(found["token_strs"]) == found["count"] > 1


def test_more_than_the_model_takes_can_be_counted(gateway: str) -> None:
    count = post(gateway, "/tokenize", {"prompt": "x" * 600})[1]["count"]
    assert count == len(TOKENIZER.encode("x" * 600)) > MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/tokenize", {}, None, "give either a prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, None, "either"),
        ("/tokenize", {"prompt": 5}, "prompt", "valid string"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x", "unknown field"),
        ("/tokenize", {"prompt": ""}, "prompt", "at least one token"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt", "cannot fit"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ("/tokenize", {"messages": [USER], "chat_template": "x"}, "chat_template", "is used"),
        (
            "/tokenize",
            {"prompt": "a", "add_generation_prompt": False},
            "add_generation_prompt",
            "needs messages",
        ),
        (
            "/tokenize",
            {"prompt": "a", "model": "other"},
            "model",
            "the model 'other' does not exist",
        ),
        ("/detokenize", {"tokens": [5, 9999]}, "tokens[1]", "outside the vocabulary"),
        ("/detokenize", {"tokens": [5] * 100_000}, "tokens", "at most"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "integer"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    gateway: str, path: str, body: Any, param: str | None, text: str
) -> None:
    status, answer, _ = post(gateway, path, body)
    assert status == (404 if param == "model" else 400)
    assert text in answer["error"]["message"]
    assert answer["error"]["param"] == param


@pytest.mark.parametrize("connect", BOTH, ids=["sync", "async"])
def test_our_own_clients(server: TritonServer, connect: Any) -> None:
    with connect(server.grpc_url) as client:
        found = client.tokenize(TEXT)
        assert list(found.token_ids) == TOKENIZER.encode(TEXT)
        assert len(found.texts) == len(found.token_ids)
        assert client.tokenize(TEXT, tenant="anybody") == found
        assert client.detokenize(found.token_ids) == TEXT
        assert client.tokenize(messages=[USER]) == client.tokenize(
            f"{CHAT}<|assistant|>", add_special_tokens=False
        )
