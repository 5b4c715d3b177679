"""Messages of Anthropic's API as the messages of a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from client.gateway.anthropic.protocol import (
    AssistantMessage,
    MessageParam,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from client.gateway.errors import ApiError

# Claude Code's first block of every system prompt: it differs from request to request, so that no
# prefix would be found in the cache.
_BILLING = "x-anthropic-billing-header:"
_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")


@dataclass
class Conversation:
    """Chat messages, and where each of them comes from.

    Attributes:
        messages: in OpenAI's form. Two of one role that follow each other are one.
        params: the field of each message in the client's request.
        is_continued: whether the last one is the model's, to be continued.
        found_tools: names of those that results refer to.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    is_continued: bool = False
    found_tools: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        system: Sequence[TextBlock],
        messages: Sequence[MessageParam],
        *,
        tools: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        takes_late_system: bool = True,
        kept_thinking: int | None = None,
    ) -> Conversation:
        """Return the conversation of a request.

        Args:
            system: before all messages.
            messages: the turns.
            tools: by name; where a result first refers to one, its definition is put into the
                prompt.
            takes_late_system: whether the chat template has a place for system messages that
                follow others. Else they become user messages, marked as the system's.
            kept_thinking: of how many turns thinking is kept, from the newest; None is all.

        Raises:
            ApiError: it ends with a call of a tool, or with thinking; or it refers to a tool that
                there is not.
        """
        made = cls()
        shown = [block for block in system if block.text and not block.text.startswith(_BILLING)]
        if shown:
            made._add("system", {"role": "system", "content": _parts(shown)})
        if kept_thinking is not None:
            messages = _without_old_thinking(messages, kept_thinking)
        for index, message in enumerate(messages):
            param = f"messages[{index}]"
            if isinstance(message, UserMessage):
                made._add_user(param, message, tools)
            elif isinstance(message, AssistantMessage):
                made._add(param, _assistant(message))
            elif takes_late_system or not made.messages or made.messages[-1]["role"] == "system":
                made._add(param, {"role": "system", "content": _parts(message.content)})
            else:
                marked = [_part("<system>"), *_parts(message.content), _part("</system>")]
                made._add(param, {"role": "user", "content": marked})
        for message_of_chat in made.messages:
            if thoughts := message_of_chat.get("reasoning_content"):
                message_of_chat["reasoning_content"] = "".join(thoughts)
        last = messages[-1]
        if isinstance(last, AssistantMessage):
            made.is_continued = True
            if not last.content or not isinstance(last.content[-1], TextBlock):
                text = "must end with a text, because it is the last message"
                raise ApiError(text, param=f"{param}.content")
        return made

    def placed(self, text: str) -> str:
        """Return the text of an error with the fields of messages in the client's request."""

        def own(found: re.Match[str]) -> str:
            index = int(found[1])
            return self.params[index] if index < len(self.params) else found[0]

        return _MESSAGE.sub(own, text)

    def _add_user(
        self, param: str, message: UserMessage, tools: Mapping[str, Mapping[str, Any]]
    ) -> None:
        for index, block in enumerate(message.content):
            if isinstance(block, ToolResultBlock):
                self._add_result(param, index, block, tools)
            else:
                self._add(param, {"role": "user", "content": _parts([block])})

    def _add_result(
        self, param: str, index: int, block: ToolResultBlock, tools: Mapping[str, Mapping[str, Any]]
    ) -> None:
        parts: list[dict[str, str]] = []
        for part, each in enumerate(block.content or ()):
            if isinstance(each, TextBlock):
                parts.append(_part(each.text))
            elif each.tool_name in self.found_tools:
                parts.append(_part(each.tool_name))
            elif each.tool_name in tools:
                self.found_tools.add(each.tool_name)
                parts.append(_part(json.dumps(tools[each.tool_name], ensure_ascii=False)))
            else:
                name = f"{param}.content[{index}].content[{part}].tool_name"
                raise ApiError("must be the name of a tool in tools", param=name)
        if block.is_error:  # chat templates know of no errors
            parts.insert(0, _part("Error:"))
        self._add(param, {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts})

    def _add(self, param: str, message: dict[str, Any]) -> None:
        last = self.messages[-1] if self.messages else {"role": None}
        if message["role"] != last["role"] or message["role"] == "tool":
            self.messages.append(message)
            self.params.append(param)
            return
        for name, more in message.items():
            if name in last and name != "role":
                last[name] += more  # lists, in place: of many turns none is copied again and again
            else:
                last[name] = more


def _without_old_thinking(messages: Sequence[MessageParam], num_kept: int) -> list[MessageParam]:
    """Return `messages` with the thinking of the last `num_kept` turns that have some.

    A turn of the model lasts until a user message without results of tools.
    """
    made: list[MessageParam] = []
    has_thinking = False  # the turn, as far as it has been read from its end
    for message in reversed(messages):
        if isinstance(message, AssistantMessage):
            others = [block for block in message.content if not isinstance(block, ThinkingBlock)]
            if num_kept:
                has_thinking |= len(others) < len(message.content)
            else:
                message = message.model_copy(update={"content": others})
        elif has_thinking and _begins_turn(message):
            num_kept, has_thinking = num_kept - 1, False
        made.append(message)
    return made[::-1]


def _begins_turn(message: MessageParam) -> bool:
    return isinstance(message, UserMessage) and not any(
        isinstance(block, ToolResultBlock) for block in message.content
    )


def _assistant(message: AssistantMessage) -> dict[str, Any]:
    blocks = message.content
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    made: dict[str, Any] = {"role": "assistant", "content": _parts(texts)}
    thoughts = [block.text for block in blocks if isinstance(block, ThinkingBlock)]
    if any(thoughts):
        made["reasoning_content"] = thoughts  # joined when the turn is complete
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.arguments},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        made["tool_calls"] = calls
    return made


def _parts(blocks: Iterable[TextBlock]) -> list[dict[str, str]]:
    return [_part(block.text) for block in blocks]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
