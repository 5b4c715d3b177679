"""ToolChoice: which functions a request offers, and whether one has to be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from client.gateway.tool_calls import grammar
from client.gateway.tool_calls.format import Function, Node, ToolCallFormat

Mode = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class ToolChoice:
    """OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`, checked. Immutable.

    Attributes:
        functions: that may be called, by name; of a named choice that one alone.
        mode: `required`: the answer is one call or more, and nothing else.
        is_parallel: whether it may have more than one.
    """

    functions: Mapping[str, Function]
    mode: Mode = "none"
    is_parallel: bool = True

    @classmethod
    def read(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
    ) -> ToolChoice:
        """Read the fields of a request; what the server checks of `tools` is left to it.

        Raises:
            ValueError: a field is wrong; the text begins with its name.
        """
        functions = dict(_function(tool, i) for i, tool in enumerate(tools or ()))
        mode: Mode = "auto" if functions else "none"
        if tool_choice in ("auto", "none", "required"):
            mode = tool_choice
        elif tool_choice is not None:
            name = _chosen(tool_choice)
            if name not in functions:
                raise ValueError(f"tool_choice.function.name: {name!r} is not one of the tools")
            functions, mode, parallel_tool_calls = {name: functions[name]}, "required", False
        if mode in ("auto", "required") and not functions:
            raise ValueError(f"tool_choice: {mode} needs tools")
        return cls(functions, mode, parallel_tool_calls is not False)

    def structure(self, form: ToolCallFormat, answer: Node | None = None) -> Node | None:
        """Return what the output must match, or None if nothing is to be enforced for tools.

        Args:
            form: of the calls.
            answer: what an answer without calls must match.

        Raises:
            ValueError: a strict function cannot be enforced in this form.
        """
        functions = self.functions.values()
        is_free = self.is_parallel and not any(function.is_strict for function in functions)
        if self.mode == "none" or (self.mode == "auto" and is_free and answer is None):
            return None
        parts = [form.call(function) for function in functions]
        calls = grammar.calls(parts, form.separator, parallel=self.is_parallel)
        if self.mode == "required":
            return calls
        if answer is not None:
            return grammar.either([answer, calls])
        triggers = [form.trigger] if form.trigger else [str(part["begin"]) for part in parts]
        return grammar.free_text(parts, triggers, parallel=self.is_parallel)


def _function(tool: Any, index: int) -> tuple[str, Function]:
    place = f"tools[{index}].function"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"{place}: must be an object")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str):
        raise ValueError(f"{place}.name: must be a string")
    if not isinstance(parameters, Mapping | None):
        raise ValueError(f"{place}.parameters: must be an object, a JSON schema")
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, Mapping | None):
        raise ValueError(f"{place}.parameters.properties: must be an object")
    return name, Function(name, parameters or {}, function.get("strict") is True)


def _chosen(tool_choice: Any) -> str:
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        function = tool_choice.get("function", tool_choice)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise ValueError(
        "tool_choice: must be auto, none, required or "
        '{"type": "function", "function": {"name": ...}}'
    )
