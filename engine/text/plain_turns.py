"""Calls of tools in the plainest form, for chat templates that refuse what one turn may have."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

_Message = dict[str, Any]


def plain_turns(messages: Sequence[_Message]) -> list[_Message]:
    """Return checked `messages` with one call per turn, its result after it, and one text beside.

    Llama 3.1's template takes no second call, and gpt-oss's no content beside reasoning.
    """
    made: list[_Message] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        made.append(message)
        if calls := message.get("tool_calls"):
            made[-1:] = _turns(message, calls, _results(rest))
    return made


def _turns(
    message: _Message, calls: list[dict[str, Any]], results: list[_Message]
) -> Iterator[_Message]:
    """Yield a turn for each call, with the result that has its id, or else one without an id."""
    by_id: dict[str | None, deque[int]] = {}
    for place, result in enumerate(results):
        by_id.setdefault(result.get("tool_call_id"), deque()).append(place)
    told, taken = _one_text(message), set()
    for call in calls:
        yield {**told, "tool_calls": [call]}
        told = {"role": message["role"], "content": ""}
        if mine := by_id.get(call.get("id")) or by_id.get(None):
            taken.add(place := mine.popleft())
            yield results[place]
    yield from (result for place, result in enumerate(results) if place not in taken)


def _results(rest: deque[_Message]) -> list[_Message]:
    """Take the results of tools from the beginning of `rest`."""
    found = []
    while rest and rest[0]["role"] == "tool":
        found.append(rest.popleft())
    return found


def _one_text(message: _Message) -> _Message:
    reasoning, content = message.get("reasoning_content"), message["content"]
    if not reasoning or not content:
        return message
    return {**message, "reasoning_content": f"{reasoning}\n\n{content}", "content": ""}
