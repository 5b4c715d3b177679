"""Bodies for the gateway whose work or memory would grow faster than the body, if it were let."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from string import ascii_uppercase, digits
from typing import Any

MODEL = "storm"
_SMALL = [{"role": "user", "content": "Hello"}]
_NUMBERS = count()


@dataclass(frozen=True)
class HostileBody:
    """One request to the gateway: a route and a body, encoded when it is sent.

    Attributes:
        plain: fields of a plain request to compare it with.
        num_requests: how many are sent at once.
    """

    name: str
    path: str
    body: Callable[[], bytes]
    plain: Mapping[str, Any] = field(default_factory=dict)
    num_requests: int = 1

    def plain_body(self, size: int) -> bytes:
        """Return a body of about `size` bytes, most of them text."""
        text = plain_text(size)
        prompts: dict[str, Any] = {
            "/v1/completions": {"prompt": text},
            "/v1/responses": {"input": text},
        }
        messages = {"messages": [{"role": "user", "content": text}]}
        prompt = prompts.get(self.path, messages)
        return json.dumps({"model": MODEL, **prompt, **self.plain}).encode()


def plain_text(size: int) -> str:
    """Return text of `size` characters at most, which no limit but that of a prompt is for."""
    return "some plain text. " * (size // 17)


def _json(
    path: str, name: str, make: Callable[[], Mapping[str, Any]], plain: Mapping[str, Any] = {}
) -> HostileBody:
    return HostileBody(name, path, lambda: json.dumps({"model": MODEL, **make()}).encode(), plain)


def _chat(
    name: str,
    make: Callable[[], Mapping[str, Any]],
    plain: Mapping[str, Any] = {},
    num_requests: int = 1,
) -> HostileBody:
    shared = {"max_tokens": 100, **plain}

    def body() -> bytes:
        return json.dumps({"model": MODEL, "messages": _SMALL, **shared, **make()}).encode()

    return HostileBody(name, "/v1/chat/completions", body, shared, num_requests)


def _tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number}"}}


def _complex_schema() -> dict[str, Any]:
    """Return fields with a schema that no server has compiled yet."""
    number = next(_NUMBERS)
    names = [f"field_{number}_{each}" for each in range(300)]
    properties = {name: {"type": "string", "pattern": "^[a-z]{1,40}[0-9]*$"} for name in names}
    return {"guided_json": {"type": "object", "properties": properties, "required": names}}


def _thoughts(count: int) -> list[dict[str, Any]]:
    thought = {"type": "thinking", "thinking": "so", "signature": ""}
    return [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [thought] * count},
        {"role": "user", "content": "Hello"},
    ]


_AMBIGUOUS = "start: s\ns: s s s | s s | /[a-z ]/\n"
_AMBIGUOUS_TOO = 'start: x\nx: "(" x* ")" | /[a-z]/ | x x\n'
# The trial of a grammar draws a letter or digit, the request `z`.
_BEHIND = 'start: /[A-Z0-9]/ | "z" s\ns: s s s | s s | /[a-z ]/\n'


def _ambiguous(name: str, grammar: str) -> HostileBody:
    return _chat(name, lambda: {"guided_grammar": _new(grammar)}, {"min_tokens": 80})


def _unfollowable(name: str, num_samples: int) -> HostileBody:
    return _chat(name, unfollowable, {"min_tokens": 80, "n": num_samples})


def unfollowable() -> dict[str, Any]:
    """Return fields with a grammar that is ambiguous where its trial does not look."""
    left_out = [*ascii_uppercase, *digits]
    return {"guided_grammar": _new(_BEHIND), "bad_words": left_out, "min_tokens": 80}


def _new(grammar: str) -> str:
    """Return a grammar that is new to the server."""
    return f"{grammar}// {next(_NUMBERS)}\n"


def _scored(name: str, num_prompts: int) -> HostileBody:
    prompts = {"prompt": ["word " * 500] * num_prompts, "max_tokens": 1}
    # With log-probabilities no prompt comes from the cache.
    plain = {**prompts, "prompt_logprobs": 0}
    return _json("/v1/completions", name, lambda: {**prompts, "prompt_logprobs": 20}, plain)


HOSTILE: tuple[HostileBody, ...] = (
    _ambiguous("ambiguous grammar", _AMBIGUOUS),
    _ambiguous("ambiguous recursion", _AMBIGUOUS_TOO),
    _chat("complex schema", _complex_schema),
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
    _scored("prompt log-probabilities", 40),
)
# These take most of a server's slots or queues while they run.
GRAMMARS: tuple[HostileBody, ...] = (
    _unfollowable("ambiguous after a token, 8 samples", 8),
    _unfollowable("ambiguous after a token, 48 samples", 48),
    _chat("40 complex schemas", _complex_schema, num_requests=40),
)
WIDE: tuple[HostileBody, ...] = (_scored("prompt log-probabilities, just allowed", 25),)
