"""Conversation: the items of a response's input as the messages of a chat."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from client.gateway.errors import ApiError
from client.gateway.responses.names import CalledName
from client.gateway.responses.protocol import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
)

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\]\.function)?")


class Conversation:
    """Messages that are made of items, and where each came from.

    Reasoning, text and calls of one turn become one message. Chat templates know no developer: such
    messages are the system's. Those with which a conversation begins are one.
    """

    def __init__(self, *, takes_late_system: bool = True) -> None:
        """Begin without a message.

        Args:
            takes_late_system: whether the chat template has a place for system messages that
                follow others. Else they become user messages, marked as the system's.
        """
        self._takes_late_system = takes_late_system
        self._messages: list[dict[str, Any]] = []
        self._params: list[str] = []  # fields of the messages
        self._calls: list[dict[int, str]] = []  # fields of their calls
        self._call_ids: set[str] = set()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages, as chats have them."""
        ends = {"content", "tool_calls"}  # a turn may have been cut off while the model reasoned
        return [each if each.keys() & ends else {**each, "content": ""} for each in self._messages]

    def add_system(self, text: str, param: str) -> None:
        """Add a system message."""
        self._add_system([_part(text)], param)

    def add(self, items: Sequence[Item], param: str) -> None:
        """Add items.

        Args:
            param: name of the field that has them; with `{}` in it, for the index of an item.

        Raises:
            ApiError: what a function returned is not of a call before it.
        """
        for index, item in enumerate(items):
            self._add_item(item, param.format(index))

    def told(self, error: ApiError) -> ApiError:
        """Return `error` with the names of items instead of those of messages."""
        params = [_MESSAGE.sub(self._told, param) for param in error.params]
        return error.reworded(_MESSAGE.sub(self._told, error.message), params)

    def _told(self, match: re.Match[str]) -> str:
        message, call = int(match[1]), match[2]
        if message >= len(self._params):
            return match[0]
        return self._params[message] if call is None else self._calls[message][int(call)]

    def _add_item(self, item: Item, param: str) -> None:
        if isinstance(item, FunctionCallOutputItem):
            if item.call_id not in self._call_ids:
                name = f"{param}.call_id"
                raise ApiError("must be the id of a function call before it", param=name)
            self._add("tool", param, content=_content(item.output), tool_call_id=item.call_id)
        elif isinstance(item, MessageItem) and item.role == "user":
            self._add("user", param, content=_content(item.content))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            self._add_system(_content(item.content), param)
        elif isinstance(item, MessageItem):
            turn = self._turn(param, "content", "tool_calls")
            turn["content"] = _content(item.content)
        elif isinstance(item, ReasoningItem):
            turn = self._turn(param, "reasoning_content", "content", "tool_calls")
            turn["reasoning_content"] = item.text
        else:
            self._add_call(item, param)

    def _add_system(self, content: list[dict[str, str]], param: str) -> None:
        if len(self._messages) == 1 and self._messages[0]["role"] == "system":
            self._messages[0]["content"] += content
        elif self._takes_late_system or not self._messages:
            self._add("system", param, content=content)
        else:
            marked = [_part("<system>"), *content, _part("</system>")]
            self._add("user", param, content=marked)

    def _add_call(self, item: FunctionCallItem, param: str) -> None:
        calls = self._turn(param).setdefault("tool_calls", [])
        name = CalledName(item.name, item.namespace).of_chat
        function = {"name": name, "arguments": item.arguments}
        self._calls[-1][len(calls)] = param
        calls.append({"id": item.call_id, "type": "function", "function": function})
        self._call_ids.add(item.call_id)

    def _turn(self, param: str, *absent: str) -> dict[str, Any]:
        """Return the model's turn that goes on, if it has none of what must be `absent` yet."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant" or any(name in last for name in absent):
            self._add("assistant", param)
        return self._messages[-1]

    def _add(self, role: str, param: str, **fields: Any) -> None:
        self._messages.append({"role": role, **fields})
        self._params.append(param)
        self._calls.append({})


def _content(content: str | list[Part]) -> list[dict[str, str]]:
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    return [_part(text) for text in texts]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
