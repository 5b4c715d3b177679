"""ToolChoice: which functions a request offers, and whether one has to be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from client.errors import InvalidRequestError
from client.gateway.schemas.limits import MAX_TOOLS
from client.gateway.tool_parsers import grammar
from client.gateway.tool_parsers.tool_parser import Function, Node, ToolParser

Mode = Literal["auto", "none", "required"]

_CHOICES = (
    'must be auto, none, required, {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)


@dataclass(frozen=True)
class ToolChoice:
    """OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`, checked. Immutable.

    Attributes:
        functions: that may be called, by name; of those that a choice names these alone.
        mode: `required`: the answer is one call or more, and nothing else.
        is_parallel: whether it may have more than one.
        is_restricted: whether the prompt has functions that must not be called.
    """

    functions: Mapping[str, Function]
    mode: Mode = "none"
    is_parallel: bool = True
    is_restricted: bool = False

    @classmethod
    def read(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
    ) -> ToolChoice:
        """Read the fields of a request; what the server checks of `tools` is left to it.

        Raises:
            InvalidRequestError: a field is wrong.
        """
        check_num_tools(len(tools or ()))
        functions = dict(_function(tool, i) for i, tool in enumerate(tools or ()))
        is_parallel = parallel_tool_calls is not False
        match tool_choice:
            case None:
                return cls(functions, "auto" if functions else "none", is_parallel)
            case "auto" if tools is not None and not functions:  # an agent without tools this time
                return cls(functions, "none", is_parallel)
            case "auto" | "none" | "required":
                mode, allowed = tool_choice, functions
            case {"type": "function"}:
                name = _chosen(tool_choice, "tool_choice", functions)
                mode, allowed, is_parallel = "required", {name: functions[name]}, False
            case {"type": "allowed_tools"}:
                mode, allowed = _allowed(tool_choice, functions)
            case _:
                raise InvalidRequestError(_CHOICES, param="tool_choice")
        if mode != "none" and not functions:
            raise InvalidRequestError(
                f"{mode} needs tools; add tools, or leave tool_choice out", param="tool_choice"
            )
        return cls(allowed, mode, is_parallel, len(allowed) < len(functions))

    def structure(self, parser: ToolParser, answer: Node | None = None) -> Node | None:
        """Return what the output must match, or None if nothing is to be enforced for tools.

        Args:
            parser: of the calls.
            answer: what an answer without calls must match.

        Raises:
            InvalidRequestError: a strict function cannot be enforced in this form.
        """
        functions = self.functions.values()
        is_strict = self.is_restricted or any(function.is_strict for function in functions)
        is_free = self.is_parallel and not is_strict
        if self.mode == "none" or (self.mode == "auto" and is_free and answer is None):
            return None
        parts = [parser.call(function) for function in functions]
        calls = grammar.calls(parts, parser.separator, parallel=self.is_parallel)
        if self.mode == "required":
            return _after(parser.reasoning, calls)
        if answer is not None:
            opened = grammar.tag(parser.answer_begin, answer, "") if parser.answer_begin else answer
            return _after(parser.reasoning, grammar.either([opened, calls]))
        if parser.text is not None:
            return _after(parser.before_text, grammar.either([parser.text, calls]))
        triggers = [parser.trigger] if parser.trigger else [str(part["begin"]) for part in parts]
        if parser.late_trigger:
            triggers.append(parser.late_trigger)
            parts += [grammar.begun_at(parser.late_trigger, part) for part in parts]
        return grammar.free_text(parts, triggers, parallel=self.is_parallel)


def check_num_tools(number: int) -> None:
    """Refuse more tools than a request may have.

    Raises:
        InvalidRequestError: there are more.
    """
    if number > MAX_TOOLS:
        raise InvalidRequestError(
            f"has {number} tools; at most {MAX_TOOLS} are allowed", param="tools"
        )


def _after(before: Node | None, enforced: Node) -> Node:
    return enforced if before is None else grammar.sequence([before, enforced])


def _function(tool: Any, index: int) -> tuple[str, Function]:
    field = f"tools[{index}]"
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequestError("must be 'function'", param=f"{field}.type")
    field, function = f"{field}.function", tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError("must be an object", param=field)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str):
        raise InvalidRequestError("must be a string", param=f"{field}.name")
    if not isinstance(parameters, Mapping | None):
        raise InvalidRequestError("must be an object, a JSON schema", param=f"{field}.parameters")
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, Mapping | None):
        raise InvalidRequestError("must be an object", param=f"{field}.parameters.properties")
    return name, Function(name, parameters or {}, function.get("strict") is True, field)


def _allowed(
    choice: Mapping[str, Any], functions: Mapping[str, Function]
) -> tuple[Mode, dict[str, Function]]:
    """Return mode and functions of `allowed_tools`, in the form of chats or of responses."""
    field = "tool_choice"
    if "allowed_tools" in choice:
        _refuse_others(choice, {"type", "allowed_tools"}, field)
        field = f"{field}.allowed_tools"
        choice = _object(choice["allowed_tools"], field)
    _refuse_others(choice, {"type", "mode", "tools"}, field)
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequestError("must be auto or required", param=f"{field}.mode")
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise InvalidRequestError(
            "must be a list of functions, and not empty", param=f"{field}.tools"
        )
    names = {_chosen(tool, f"{field}.tools[{i}]", functions) for i, tool in enumerate(tools)}
    return mode, {name: function for name, function in functions.items() if name in names}


def _chosen(choice: Any, field: str, functions: Mapping[str, Function]) -> str:
    """Return the name of the function that is named, in the form of chats or of responses."""
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise InvalidRequestError("must be 'function'", param=f"{field}.type")
    if "function" in choice:
        _refuse_others(choice, {"type", "function"}, field)
        field = f"{field}.function"
        choice = _object(choice["function"], field)
    _refuse_others(choice, {"type", "name"}, field)
    name = choice.get("name")
    if not isinstance(name, str):
        raise InvalidRequestError("must be a string", param=f"{field}.name")
    if name not in functions:
        raise InvalidRequestError(f"{name!r} is not one of the tools", param=f"{field}.name")
    return name


def _object(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError("must be an object", param=field)
    return value


def _refuse_others(fields: Mapping[str, Any], known: set[str], field: str) -> None:
    for name, value in fields.items():
        if name not in known and value is not None:
            raise InvalidRequestError(
                "unknown field", param=f"{field}.{name}", code="unknown_parameter"
            )
