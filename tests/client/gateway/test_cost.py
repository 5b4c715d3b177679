"""What a request takes of the gateway grows no faster than its body, or than its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.client.fake_triton import Piece
from tests.client.gateway.in_process import HELLO, InProcess
from tests.factories.costs import Cost, assert_linear

USER = {"role": "user", "content": "a"}
MESSAGES = {"model": "ensemble", "max_tokens": 1}
CHAT = {"messages": [USER]}


@pytest.fixture(scope="module")
def shared() -> Iterator[InProcess]:
    with InProcess() as made:
        yield made


@pytest.fixture
def gateway(shared: InProcess) -> InProcess:
    shared.pieces = HELLO
    return shared


def test_count_tokens_many_turns_of_one_role_cost_is_linear(gateway: InProcess) -> None:
    def cost(count: int) -> Cost:
        thought = {"type": "thinking", "thinking": "a thought of some words. " * 20}
        turns = [{"role": "assistant", "content": [thought]}] * count
        body = {"model": "ensemble", "messages": [USER, *turns, USER]}
        return gateway.cost("/v1/messages/count_tokens", body, memory=False)

    assert_linear(cost, 4000)


def _words(count: int, kind: str = "content", text: str = "a word ") -> Sequence[Piece]:
    last = Piece({0: ""}, finished=(0,), final=True, section=(0, kind))
    return [*[Piece({0: text * 150}, section=(0, kind))] * count, last]


@pytest.mark.parametrize("kind", ["content", "reasoning"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {**MESSAGES, "messages": [USER]}),
    ],
)
def test_answer_many_pieces_cost_is_linear(
    gateway: InProcess, path: str, body: dict[str, Any], stream: bool, kind: str
) -> None:
    def cost(count: int) -> Cost:
        gateway.pieces = _words(count, kind)
        return gateway.cost(path, {**body, "stream": stream}, memory=False)

    assert_linear(cost, 2000)


TOOLS = {
    "/v1/chat/completions": {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
    "/v1/responses": {"input": "a", "tools": [{"type": "function", "name": "f"}]},
    "/v1/messages": {
        **MESSAGES,
        "messages": [USER],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
}


def _calls(count: int, num_pieces: int) -> list[Piece]:
    """Return `count` calls, whose arguments come in so many pieces each."""
    pieces: list[Piece] = []
    for number in range(count):
        texts = ['{"name": "f", "arguments": {"a": "', *["a word " * 1000] * num_pieces, '"}}']
        pieces += [Piece({0: text}, section=(number, "tool_call")) for text in texts]
    last = Piece({0: ""}, finished=(0,), final=True, section=(count, "content"))
    return [*pieces, last]


@pytest.mark.parametrize("shape", ["one call", "many calls"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TOOLS)
def test_answer_longer_arguments_of_calls_cost_is_linear(
    gateway: InProcess, path: str, stream: bool, shape: str
) -> None:
    def cost(size: int) -> Cost:
        count, num_pieces = (1, size) if shape == "one call" else (size // 4, 2)
        gateway.pieces = _calls(count, num_pieces)
        found = gateway.cost(path, {**TOOLS[path], "stream": stream}, memory=False)
        assert found.answer.count(b"word ") >= count * num_pieces * 1000
        return Cost(found.seconds, found.peak)  # an error must not show the answer

    assert_linear(cost, 600)
