"""Bodies for the gateway whose work or memory would grow faster than the body, if it were let."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "storm"
_SMALL = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class HostileBody:
    """One request to the gateway: a route and a body, encoded when it is first sent."""

    name: str
    path: str
    body: Callable[[], bytes]


def _json(path: str, name: str, make: Callable[[], Mapping[str, Any]]) -> HostileBody:
    return HostileBody(name, path, lambda: json.dumps({"model": MODEL, **make()}).encode())


def _chat(name: str, make: Callable[[], Mapping[str, Any]]) -> HostileBody:
    return _json(
        "/v1/chat/completions", name, lambda: {"messages": _SMALL, "max_tokens": 100, **make()}
    )


def _tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number}"}}


def _complex_schema(number: int) -> dict[str, Any]:
    names = [f"field_{number}_{each}" for each in range(300)]
    properties = {name: {"type": "string", "pattern": "^[a-z]{1,40}[0-9]*$"} for name in names}
    return {"type": "object", "properties": properties, "required": names}


def _thoughts(count: int) -> list[dict[str, Any]]:
    thought = {"type": "thinking", "thinking": "so", "signature": ""}
    return [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [thought] * count},
        {"role": "user", "content": "Hello"},
    ]


_AMBIGUOUS = "start: s\ns: s s s | s s | /[a-z ]/\n"
_AMBIGUOUS_TOO = 'start: x\nx: "(" x* ")" | /[a-z]/ | x x\n'

HOSTILE: tuple[HostileBody, ...] = (
    _chat("ambiguous grammar", lambda: {"min_tokens": 80, "guided_grammar": _AMBIGUOUS}),
    _chat("ambiguous recursion", lambda: {"min_tokens": 80, "guided_grammar": _AMBIGUOUS_TOO}),
    _chat("complex schema", lambda: {"guided_json": _complex_schema(0)}),
    _chat("34,000 tools", lambda: {"tools": [_tool(each) for each in range(34_000)]}),
    HostileBody(
        "deep JSON",
        "/v1/chat/completions",
        lambda: b'{"model": "storm", "messages": ' + b"[" * 1_000_000,
    ),
    _json(
        "/v1/responses",
        "160,000 references",
        lambda: {"input": [{"type": "item_reference", "id": "msg_1"}] * 160_000},
    ),
    _json(
        "/v1/completions",
        "128 prompts with a large field",
        lambda: {"prompt": ["a"] * 128, "max_tokens": 1, "stop": ["x" * 4_000_000]},
    ),
    _json(
        "/v1/messages/count_tokens",
        "62,000 thoughts",
        lambda: {"messages": _thoughts(62_000)},
    ),
    _json(
        "/v1/completions",
        "prompt log-probabilities",
        lambda: {"prompt": ["word " * 500] * 40, "max_tokens": 1, "prompt_logprobs": 20},
    ),
)
