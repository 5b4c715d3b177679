"""Whether work grows faster than what it is for: measuring it, and values that grow."""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

DIGITS = "DIGITS"  # stands for as many digits as wanted, which are no int of Python's
_DEPTH = 7
_FREE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Cost:
    """What an action took.

    Attributes:
        seconds: of the processor, in all threads.
        peak: bytes of Python's objects, beside those that were there before.
    """

    seconds: float
    peak: int


def cost_of(action: Callable[[], object], *, rounds: int = 1, memory: bool = True) -> Cost:
    """Return what `action` takes: the least of several rounds."""
    times = []
    for _ in range(rounds):
        with _without_garbage_collection():
            started = time.process_time()
            action()
            times.append(time.process_time() - started)
    return Cost(min(times), peak_of(action) if memory else 0)


def peak_of(action: Callable[[], object]) -> int:
    """Return by how many bytes Python's objects grow at most."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Looking for garbage takes time by what else is there."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def assert_linear(
    cost: Callable[[int], Cost], size: int, *, doublings: int = 1, factor: float = 2.8
) -> None:
    """Check that a doubled size takes at most `factor` times as much, and so on.

    Noise cannot fail it: what takes little anyway is not compared, and what took too much is
    measured again.
    """
    for step in range(1, doublings + 1):
        for _ in range(4):
            before, after = cost(size), cost(size * 2**step)
            if is_linear(before, after, factor**step):
                break
        else:
            raise AssertionError((before, after))


def is_linear(before: Cost, after: Cost, factor: float) -> bool:
    """Return whether `after` is at most `factor` times as much, or little."""
    return (
        after.seconds < factor * before.seconds + 0.01 and after.peak < factor * before.peak + 2**18
    )


class Schemas:
    """JSON schemas by name, and values of them."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas

    def grown(
        self, schema: Mapping[str, Any], size: int, depth: int = _DEPTH
    ) -> Iterator[tuple[str, Any]]:
        """Yield values of a schema of about `size` bytes, one field of which is large: its name."""
        schema = self.resolved(schema)
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
            yield "", DIGITS
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
        schema = self.resolved(schema)
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

    def resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a schema refers to."""
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema
