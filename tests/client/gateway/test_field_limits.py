"""Fields that the engine would refuse for their size are refused before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from client.gateway.generation import AT_ONCE
from client.gateway.schemas import limits
from engine.text.grammar import spec
from engine.validation import limits as of_engine
from tests.client.gateway.in_process import InProcess

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
}
LONG = 2**20


@pytest.fixture(scope="module")
def gateway() -> Iterator[InProcess]:
    with InProcess() as made:
        yield made


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("stop", ["a"] * 257, "must have at most 256 strings (got 257)"),
        ("stop", "a" * 1025, "must have at most 1024 characters (got 1025)"),
        ("stop", ["a" * 1000] * 9, "must have at most 8192 characters in all (got 9000)"),
        ("bad_words", ["a"] * 257, "must have at most 256 strings (got 257)"),
        ("stop_token_ids", [1] * 1025, "must have at most 1024 tokens (got 1025)"),
        (
            "logit_bias",
            {str(i): 1 for i in range(1025)},
            "must have at most 1024 tokens (got 1025)",
        ),
        ("allowed_token_ids", [1] * 16385, "must have at most 16384 tokens (got 16385)"),
        ("dry_sequence_breakers", ["a"] * 33, "must have at most 32 strings (got 33)"),
        ("dry_sequence_breakers", ["a" * 41], "must have at most 40 characters (got 41)"),
        ("logits_processors", ["a"] * 9, "must have at most 8 processors (got 9)"),
        ("guided_regex", "a" * LONG, "must have at most 32768 characters (got 1048576)"),
        ("guided_grammar", "a" * LONG, "must have at most 131072 characters (got 1048576)"),
        ("guided_json", "a" * LONG, "must have at most 524288 characters (got 1048576)"),
        ("cache_salt", "a" * LONG, "must have at most 1024 characters (got 1048576)"),
        ("guided_choice", ["a" * LONG], "at most 524288 are allowed in all"),
        ("structured_outputs", {"choice": ["a" * LONG]}, "at most 524288 are allowed in all"),
    ],
)
def test_field_above_its_limit_is_refused_unsent(
    gateway: InProcess, path: str, field: str, value: Any, told: str
) -> None:
    before = gateway.num_bytes
    status, answer = gateway.ask(path, {**ROUTES[path], field: value})
    error = json.loads(answer)["error"]
    param = f"{field}[0]" if value == ["a" * 41] else field
    assert (status, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")
    assert told in error["message"]
    assert gateway.num_bytes == before


USER = {"role": "user", "content": "a"}
TURNS = [USER, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER] * 4097}, "messages"),
        ("/tokenize", {"messages": [USER] * 4097}, "messages"),
        ("/v1/messages", {"model": "ensemble", "max_tokens": 1, "messages": TURNS * 2049}, None),
        ("/v1/messages/count_tokens", {"model": "ensemble", "messages": TURNS * 2049}, None),
        ("/v1/responses", {"input": [USER] * 4097}, "input"),
        ("/v1/responses", {"input": [USER] * 16385}, "input"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"a": "b" * 2**21}},
            "chat_template_kwargs",
        ),
    ],
)
def test_conversation_above_its_limit_is_refused_unsent(
    gateway: InProcess, path: str, body: dict[str, Any], param: str | None
) -> None:
    before = gateway.num_bytes
    status, answer = gateway.ask(path, body)
    error = json.loads(answer)["error"]
    assert (status, error.get("param")) == (400, param)
    assert " at most " in error["message"]
    assert gateway.num_bytes == before


def test_limits_are_those_of_the_engine() -> None:
    names = [name for name in vars(limits) if name.startswith("MAX_") and hasattr(of_engine, name)]
    assert len(names) > 12
    for name in names:
        assert getattr(limits, name) == getattr(of_engine, name)
    assert spec.MAX_CHARACTERS["regex"] == limits.MAX_REGEX_CHARACTERS
    assert spec.MAX_CHARACTERS["grammar"] == limits.MAX_GRAMMAR_CHARACTERS
    assert spec.MAX_CHARACTERS["json_schema"] == limits.MAX_SCHEMA_CHARACTERS


def test_many_prompts_are_under_way_a_few_at_a_time(gateway: InProcess) -> None:
    gateway.most_under_way = 0
    status, answer = gateway.ask("/v1/completions", {"prompt": ["a"] * 128, "stop": ["b"]})
    assert status == 200
    assert [each["index"] for each in json.loads(answer)["choices"]] == list(range(128))
    assert gateway.most_under_way == AT_ONCE


def test_many_prompts_share_their_parameters(gateway: InProcess) -> None:
    choices = [f"choice {i}" for i in range(30_000)]  # as many as there may be, nearly

    def cost(count: int) -> Any:
        body = {"prompt": ["a"] * count, "structured_outputs": {"choice": choices}}
        return gateway.cost("/v1/completions", body, rounds=3)

    one, many = cost(1), cost(128)
    assert (one.status, many.status) == (200, 200)
    # Encoded once: what each prompt adds is the copies of a text that is there.
    assert many.seconds < 10 * one.seconds + 0.05
    assert many.peak < one.peak + 2 * AT_ONCE * 2**19
