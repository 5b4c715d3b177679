"""Conversations in plainer forms, for chat templates that refuse what OpenAI's may have."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

_Message = dict[str, Any]

# Between a tool's result and the user's next words, as Mistral's own agent has it.
_ACKNOWLEDGEMENT = "Understood."
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


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
    for index, result in enumerate(results):
        by_id.setdefault(result.get("tool_call_id"), deque()).append(index)
    told, taken = _one_text(message), set()
    for call in calls:
        yield {**told, "tool_calls": [call]}
        told = {"role": message["role"], "content": ""}
        if mine := by_id.get(call.get("id")) or by_id.get(None):
            taken.add(index := mine.popleft())
            yield results[index]
    yield from (result for index, result in enumerate(results) if index not in taken)


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


def short_call_ids(messages: Sequence[_Message]) -> list[_Message]:
    """Return checked `messages` with ids of calls that are nine letters and digits, as Mistral's.

    An id becomes the same in every request, so that prompts keep their prefixes. A result without
    an id is that of the next call that no result names.
    """
    named = {message.get("tool_call_id") for message in messages}
    made: list[_Message] = []
    num_calls, unanswered = 0, deque[str]()
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [call.get("id") or str(i) for i, call in enumerate(calls, num_calls)]
            num_calls += len(calls)
            unanswered = deque(call_id for call_id in ids if call_id not in named)
            short = [{**call, "id": _short_id(i)} for call, i in zip(calls, ids, strict=True)]
            message = {**message, "tool_calls": short}
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id") or (unanswered.popleft() if unanswered else "")
            message = {**message, "tool_call_id": _short_id(call_id)}
        made.append(message)
    return made


def alternating_turns(messages: Sequence[_Message]) -> list[_Message]:
    """Return checked `messages` with turns of the user and the model that alternate, as Mistral's.

    Messages of one role that follow each other are one, and the model acknowledges a tool's result
    that the user's words follow. Ids of calls are short.
    """
    made: list[_Message] = []
    for message in _joined(messages):
        if message["role"] == "user" and made and _leaves_turn_open(made[-1]):
            made.append({"role": "assistant", "content": _ACKNOWLEDGEMENT})
        made.append(message)
    return short_call_ids(made)


def system_said_by_user(messages: Sequence[_Message]) -> list[_Message]:
    """Return `messages` with the one system message that begins them in the user's last words.

    There Mistral Nemo's template shows it, but only while the user's words are the last.
    """
    system, *rest = messages
    roles = [message["role"] for message in rest]
    if system["role"] != "system" or "user" not in roles or roles[0] == "system":
        return list(messages)
    last = len(roles) - 1 - roles[::-1].index("user")
    user = {**rest[last], "content": f"{system['content']}\n\n{rest[last]['content']}"}
    return [*rest[:last], user, *rest[last + 1 :]]


def _leaves_turn_open(message: _Message) -> bool:
    return message["role"] == "tool" or "tool_calls" in message


def _joined(messages: Sequence[_Message]) -> list[_Message]:
    """Return the messages, those of one role that follow each other as one."""
    turns: list[list[_Message]] = []
    for message in messages:
        last = turns[-1][-1] if turns else None
        if last and last["role"] == message["role"] and not _leaves_turn_open(last):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_one_message(turn) for turn in turns]


def _one_message(turn: Sequence[_Message]) -> _Message:
    made: _Message = {}
    for message in turn:
        made |= message
    for name in ("content", "reasoning_content"):
        if texts := [message[name] for message in turn if message.get(name)]:
            made[name] = "\n\n".join(texts)
    return made


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
