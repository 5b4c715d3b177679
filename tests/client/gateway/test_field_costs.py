"""Whatever field of a body grows, what it takes of the gateway grows no faster.

The fields are those of the OpenAPI document: texts, numbers, lists and objects at every depth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.client.gateway.in_process import InProcess

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
_DIGITS = "DIGITS"  # stands for as many digits as wanted, which are no int of Python's
_DEPTH = 7
_FREE: Mapping[str, Any] = {}


class Document:
    """The schemas of bodies, and values of them."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self._paths = document["paths"]

    def routes(self) -> set[str]:
        """Return the routes that take a body."""
        return {path for path, methods in self._paths.items() if "post" in methods}

    def body(self, path: str) -> Mapping[str, Any]:
        """Return the schema of a route's body."""
        content = self._paths[path]["post"]["requestBody"]["content"]
        return self._resolved(content["application/json"]["schema"])

    def grown(
        self, schema: Mapping[str, Any], size: int, depth: int = _DEPTH
    ) -> Iterator[tuple[str, Any]]:
        """Yield values of a schema of about `size` bytes, one field of which is large: its name."""
        schema = self._resolved(schema)
        kinds = schema.get("anyOf") or schema.get("oneOf")
        if not depth or "const" in schema or "enum" in schema:
            return
        if kinds:
            for number, each in enumerate(kinds):
                for field, value in self.grown(each, size, depth):
                    yield f"|{number}{field}", value
            return
        kind = schema.get("type", "any")
        if kind in ("string", "any"):
            yield "", "a" * size
        if kind in ("integer", "number"):
            yield "", _DIGITS
        if kind in ("array", "any"):
            yield from self._arrays(schema.get("items", {"type": "integer"}), size, depth)
        if kind in ("object", "any"):
            yield from self._objects(schema, size, depth)

    def _arrays(self, items: Mapping[str, Any], size: int, depth: int) -> Iterator[tuple[str, Any]]:
        for number, element in enumerate(self._least(items)):
            yield f"[]{number or ''}", [element] * (size // len(json.dumps([element])) + 1)
        if items:
            for field, value in self.grown(items, size, depth - 1):
                yield f"[0]{field}", [value]

    def _objects(
        self, schema: Mapping[str, Any], size: int, depth: int
    ) -> Iterator[tuple[str, Any]]:
        (least, *_) = self._least({**schema, "type": "object"})
        for name, inner in schema.get("properties", {}).items():
            for field, value in self.grown(inner, size, depth - 1):
                yield f".{name}{field}", {**least, name: value}
        others = schema.get("additionalProperties", not schema.get("properties"))
        if others is not False:
            (value, *_) = self._least(_FREE if others is True else others)
            yield "{}", {f"{number:07}": value for number in range(size // 14)}
            yield "{name}", {"a" * size: value}
            if others is not True:
                for field, value in self.grown(others, size, depth - 1):
                    yield f"{{0}}{field}", {"a": value}

    def _least(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return the least values of a schema, one of each kind."""
        schema = self._resolved(schema)
        if kinds := schema.get("anyOf") or schema.get("oneOf"):
            return [value for kind in kinds for value in self._least(kind)]
        if "const" in schema:
            return [schema["const"]]
        if "enum" in schema:
            return schema["enum"][:1]
        kind = schema.get("type")
        if kind == "object":
            required = schema.get("required", ())
            members = schema.get("properties", {}).items()
            return [{name: self._least(each)[0] for name, each in members if name in required}]
        if kind == "array":
            return [self._least(schema["items"])[:1] if schema.get("minItems") else []]
        number = schema.get("minimum", 1)
        return [
            {"integer": number, "number": number, "boolean": False, "null": None}.get(kind, "a")
        ]

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


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
            text = json.dumps({**base, name: value}).replace(f'"{_DIGITS}"', "1" * size)
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
        return gateway.peak(lambda: gateway.ask(path, body))

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
