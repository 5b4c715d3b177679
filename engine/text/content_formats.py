"""Content formats: whether a chat template takes a content as a string or as text parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

ContentFormat = Literal["string", "openai"]  # vLLM's words; "openai" is a list of parts

_MARK = "trident0mark"
# A list of parts that the template has written as such, and not its text.
_AS_DATA = re.compile(rf"""['"]text['"]\s*:\s*['"]{_MARK}""")
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
# Some templates take no conversation without tools.
TOOL: Mapping[str, Any] = MappingProxyType(
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    }
)


def find_content_formats(render: Callable[..., str]) -> dict[str, ContentFormat]:
    """Return the format of each role's content, found out by rendering a conversation each.

    A string if the template shows it; else a list of parts if it shows these; else a string.

    Args:
        render: the chat template; takes messages, and may raise anything.
    """
    formats: dict[str, ContentFormat] = {}
    for role in ("user", "system", "assistant", "tool"):
        candidates: tuple[ContentFormat, ...] = ("string", "openai")
        for candidate in candidates:
            if _shows(render, in_formats(_conversation(role), {**formats, role: candidate})):
                formats[role] = candidate
                break
    return formats


def in_formats(
    messages: Sequence[Mapping[str, Any]], formats: Mapping[str, ContentFormat]
) -> list[dict[str, Any]]:
    """Return `messages`, whose contents are strings, with the contents in their roles' `formats`.

    A role that has none takes the format of the user's.
    """
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if formats.get(message["role"], formats.get("user")) == "openai"
        else dict(message)
        for message in messages
    ]


def _conversation(role: str) -> list[dict[str, Any]]:
    """Return a conversation in which the mark is the content of `role`."""
    user, marked = {"role": "user", "content": "a"}, {"role": role, "content": _MARK}
    if role == "user":
        return [marked]
    if role == "system":
        return [marked, user]
    if role == "assistant":
        return [user, marked, user]
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    return [user, call, {**marked, "tool_call_id": _CALL["id"]}]


def _shows(render: Callable[..., str], messages: list[dict[str, Any]]) -> bool:
    for tools in (None, [dict(TOOL)]):
        try:
            prompt = render(messages, tools=tools, add_generation_prompt=True)
        except Exception:  # it need not take every conversation
            continue
        if _MARK in prompt and not _AS_DATA.search(prompt):
            return True
    return False
