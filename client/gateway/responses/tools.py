"""OfferedTools: the functions of a request for a response, as the model is offered them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from client.gateway.errors import unsupported
from client.gateway.openai.tools import refuse_too_many
from client.gateway.responses.names import CalledName
from client.gateway.responses.protocol import (
    FunctionTool,
    HostedTool,
    NamespaceTool,
    ResponseRequest,
    Tool,
)

_TOOL = re.compile(r"\btools\[(\d+)\](?:\.function\b)?")


class _Offered(NamedTuple):
    param: str
    tool: FunctionTool
    namespace: NamespaceTool | None


class OfferedTools:
    """Functions, and those of namespaces. Tools that somebody else would have to run are left out.

    Attributes:
        of_chat: in the form of chats.
        told: in that of responses.
        names: of the functions of namespaces, by what the model calls them.
    """

    def __init__(self, body: ResponseRequest) -> None:
        """Take those of a request.

        Raises:
            ApiError: one has to be called, and it may be one that is left out.
        """
        given = body.tools or []
        refuse_too_many(_number(given))
        for index, tool in enumerate(given):
            if isinstance(tool, HostedTool) and body.tool_choice == "required":
                raise unsupported(
                    f"tools[{index}]",
                    f"{tool.type!r} is not supported: this server does not run it",
                )
        offered = list(_offered(given))
        self.of_chat = [_chat_tool(each) for each in offered]
        self.told = [_told(tool) for tool in given if not isinstance(tool, HostedTool)]
        names = [
            CalledName(tool.name, namespace.name) for _, tool, namespace in offered if namespace
        ]
        self.names = {each.of_chat: each for each in names}
        self._params = [each.param for each in offered]

    def placed(self, text: str) -> str:
        """Return the text of an error of a chat with the fields of tools in the request."""

        def own(found: re.Match[str]) -> str:
            index = int(found[1])
            return self._params[index] if index < len(self._params) else f"tools[{index}]"

        return _TOOL.sub(own, text)


def _number(given: Sequence[Tool]) -> int:
    """Return how many tools there are, with those of namespaces and those that are left out."""
    return sum(len(tool.tools) if isinstance(tool, NamespaceTool) else 1 for tool in given)


def _offered(given: Sequence[Tool]) -> Iterator[_Offered]:
    for index, tool in enumerate(given):
        param = f"tools[{index}]"
        if isinstance(tool, FunctionTool):
            yield _Offered(param, tool, None)
        elif isinstance(tool, NamespaceTool):
            for inner, function in enumerate(tool.tools):
                yield _Offered(f"{param}.tools[{inner}]", function, tool)


def _chat_tool(offered: _Offered) -> dict[str, Any]:
    _, tool, namespace = offered
    function = tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
    if tool.strict:  # false is the default and is dropped
        function["strict"] = True
    if namespace is not None:
        function["name"] = CalledName(tool.name, namespace.name).of_chat
        texts = (namespace.description, tool.description)
        function["description"] = "\n".join(text for text in texts if text)
    return {"type": "function", "function": function}


def _told(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    if isinstance(tool, NamespaceTool):
        return {**tool.model_dump(), "tools": [_told(each) for each in tool.tools]}
    return {**tool.model_dump(exclude={"defer_loading"}), "strict": tool.strict is True}
