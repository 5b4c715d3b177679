"""Whatever field of a body grows, what it takes of the gateway grows no faster.

The fields are those of the OpenAPI document: texts, numbers, lists and objects at every depth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.client.gateway.in_process import InProcess
from tests.factories.costs import DIGITS, Schemas, peak_of

USER = {"role": "user", "content": "a"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"model": "ensemble", "max_tokens": 1, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "ensemble", "messages": [USER]},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
# Of chats the document does not say more than that they are objects.
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MANY: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "turns": lambda n: [USER, {"role": "assistant", "content": "b"}] * n,
    "parts": lambda n: [{"role": "user", "content": [{"type": "text", "text": "a"}] * n}],
    "calls": lambda n: [USER, {"role": "assistant", "tool_calls": [CALL] * n}],
    "reasoning": lambda n: [USER, {"role": "assistant", "reasoning": "a" * 40 * n}],
    "members": lambda n: [{**USER, **{f"x{i}": 1 for i in range(n)}}],
}


class Document(Schemas):
    """The schemas of bodies, and values of them."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(document["components"]["schemas"])
        self._paths = document["paths"]

    def routes(self) -> set[str]:
        """Return the routes that take a body."""
        return {path for path, methods in self._paths.items() if "post" in methods}

    def body(self, path: str) -> Mapping[str, Any]:
        """Return the schema of a route's body."""
        content = self._paths[path]["post"]["requestBody"]["content"]
        return self.resolved(content["application/json"]["schema"])


@pytest.fixture(scope="module")
def gateway() -> Iterator[InProcess]:
    with InProcess() as made:
        yield made


def cases(gateway: InProcess, path: str, size: int) -> Iterator[tuple[str, bytes]]:
    """Yield bodies of about `size` bytes, and which field of them is large."""
    document = Document(gateway.document())
    base = BODIES[path]
    for name, schema in document.body(path)["properties"].items():
        for field, value in document.grown(schema, size):
            text = json.dumps({**base, name: value}).replace(f'"{DIGITS}"', "1" * size)
            yield f"{name}{field}", text.encode()
    if path in ("/v1/chat/completions", "/tokenize"):
        for field, make in MANY.items():
            messages = make(size // 40)
            yield f"messages: {field}", json.dumps({"messages": messages}).encode()


def test_every_route_with_a_body_is_here(gateway: InProcess) -> None:
    assert Document(gateway.document()).routes() == BODIES.keys()


SIZES = pytest.mark.parametrize("size", [2**15, pytest.param(2**19, marks=pytest.mark.large)])


@SIZES
@pytest.mark.parametrize("path", BODIES)
def test_time_for_a_field_is_linear(gateway: InProcess, path: str, size: int) -> None:
    def seconds(body: bytes) -> float:
        cost = gateway.cost(path, body, memory=False)
        assert b"internal error" not in cost.answer
        return cost.seconds

    # A body that exceeds a limit only at four times its size may be read once more to be refused.
    unseen = 0.02 + size * 2e-7
    assert not faster_than_linear(gateway, path, size, seconds, unseen)


@SIZES
@pytest.mark.parametrize("path", BODIES)
def test_memory_for_a_field_is_linear(gateway: InProcess, path: str, size: int) -> None:
    def peak(body: bytes) -> float:
        return peak_of(lambda: gateway.ask(path, body))

    assert not faster_than_linear(gateway, path, size // 8, peak, unseen=2**18)


def faster_than_linear(
    gateway: InProcess, path: str, size: int, cost: Callable[[bytes], float], unseen: float
) -> dict[str, tuple[float, float]]:
    """Return the fields of which four times the size cost more than six times as much.

    Args:
        size: bytes of the smaller bodies.
        cost: of a request with a body.
        unseen: a cost that says nothing.
    """
    smaller, larger = dict(cases(gateway, path, size)), dict(cases(gateway, path, 4 * size))
    assert len(smaller) == len(larger) > 1
    gateway.ask(path, BODIES[path])  # what is made once
    wrong = {}
    for field, body in larger.items():
        for _ in range(4):  # other programs may have had the caches
            before, after = cost(smaller[field]), cost(body)
            if after < 6 * before + unseen:
                break
        else:
            wrong[field] = (before, after)
    return wrong
