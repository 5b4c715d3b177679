"""ChatParameters: the tools and variables that a request gives the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.errors import RequestError, UnknownParameterError, UnsupportedError
from engine.json_reader import parse_json_fields
from engine.validation.checks import member
from engine.validation.limits import MAX_CHAT_CHARACTERS, MAX_TOOLS, check_size

CACHE_MARK = "cache_control"  # Anthropic's; prefixes are cached whether they are marked or not
# Fields of vLLM that are not implemented, and why.
_REFUSED = {
    "chat_template": "a template of the client's own may run for ever; the server's is used",
    "documents": "not supported by this version of Trident",
}
# By which requests switch reasoning on and off, or choose how much of it.
_REASONING_SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
# Arguments of `apply_chat_template` that are not the template's.
_RESERVED = frozenset(
    {
        *("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)


@dataclass(frozen=True)
class ChatParameters:
    """Arguments of the chat template, in vLLM's names. Immutable.

    Attributes:
        tools: functions that the model may call, in OpenAI's form.
        add_generation_prompt: open the assistant's answer at the end of the prompt.
        continue_final_message: leave the last message open, to be continued.
        chat_template_kwargs: variables of the template, as `enable_thinking`.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ChatParameters:
        """Read the JSON object `text`, as `of` does; "" gives the defaults."""
        return cls.of(_object(text))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ChatParameters:
        """Build from untrusted fields.

        Raises:
            UnsupportedError: a field of vLLM that Trident does not implement.
            RequestError: anything else is wrong; the text names the field, as `tools[0].function`.
        """
        fields = dict(given)
        for name, reason in _REFUSED.items():
            if fields.pop(name, None) is not None:
                raise UnsupportedError(reason, param=name)
        tools = fields.pop("tools", None)
        kwargs = fields.pop("chat_template_kwargs", None)
        if kwargs is not None and not isinstance(kwargs, dict):
            raise RequestError("must be an object", param="chat_template_kwargs")
        for name in kwargs or {}:
            if name in _RESERVED or name in _REFUSED:
                raise RequestError(
                    "must be a variable of the chat template; this name is reserved",
                    param=_variable(name),
                )
        continued = _boolean(fields, "continue_final_message", False)
        opened = _boolean(fields, "add_generation_prompt", not continued)
        if continued and opened:
            raise RequestError(
                "cannot be true together with add_generation_prompt; set that to false",
                param="continue_final_message",
            )
        for name in fields:
            raise UnknownParameterError("unknown field", param=member("chat_parameters", name))
        return cls(_tools(tools), opened, continued, kwargs or {})

    def check_template(self, template: str) -> None:
        """Refuse what the chat template with this source would leave out silently.

        Raises:
            UnsupportedError: the text names the parameter.
        """
        if self.tools and not _mentions(template, "tools"):
            raise UnsupportedError(
                "not supported by this model: its chat template does not use tools",
                param="tools",
            )
        for name in self.chat_template_kwargs:
            if not _mentions(template, name):
                raise UnsupportedError(
                    "not supported by this model: its chat template has no such variable",
                    param=_variable(name),
                )


def spelled_out(
    tools: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], ...]]:
    """Yield checked `tools` with ever more of what some chat templates read of each.

    First an empty description, and an object without properties, where these are missing; then
    the same of each parameter, and types in the plainest form; then defaults as JSON texts. The
    last two are left out if a schema is nested too deeply.
    """
    yield tuple(_with_fields(tool, lambda schema: schema) for tool in tools)
    with suppress(RecursionError):
        yield tuple(_with_fields(tool, _plain_schema) for tool in tools)
        yield tuple(_with_fields(tool, partial(_plain_schema, has_texts=True)) for tool in tools)


def _with_fields(tool: Mapping[str, Any], plain: Callable[[Any], Any]) -> dict[str, Any]:
    given = tool["function"]
    function = {"name": given["name"], "description": "", "parameters": {}, **given}
    parameters = {"type": "object", "properties": {}, **function["parameters"]}
    if isinstance(parameters["properties"], dict):
        properties = parameters["properties"].items()
        parameters["properties"] = {name: plain(schema) for name, schema in properties}
    return {**tool, "function": {**function, "parameters": parameters}}


def _plain_schema(schema: Any, *, has_texts: bool = False) -> Any:
    """Return a JSON schema that is equivalent to `schema`.

    It has a description, one type or `anyOf`, and `additionalProperties` of objects; if `has_texts`
    the default is the JSON text of it.
    """
    plain = partial(_plain_schema, has_texts=has_texts)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    made = {"description": "", **schema}
    if isinstance(made.get("type"), list) and "anyOf" not in made:
        made["anyOf"] = [{"type": each} for each in made.pop("type")]
    if made.get("type") == "object":
        made.setdefault("additionalProperties", {})
    if isinstance(made.get("properties"), dict):
        made["properties"] = {name: plain(each) for name, each in made["properties"].items()}
    if isinstance(made.get("items"), dict):
        made["items"] = plain(made["items"])
    if has_texts and not isinstance(made.get("default", ""), str):
        made["default"] = json.dumps(made["default"], ensure_ascii=False)
    return made


def reasoning_switches(template: str) -> list[str]:
    """Return those variables of the chat template with this source that control reasoning."""
    code = " ".join(re.findall(r"\{[{%].*?[%}]\}", template, re.DOTALL))
    # Neither attributes nor keys, as in `message.thinking` and `message['thinking']`.
    return [name for name in _REASONING_SWITCHES if re.search(rf"(?<![\w.'\"]){name}\b", code)]


def _variable(name: str) -> str:
    return member("chat_template_kwargs", name)


def _mentions(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _object(text: str) -> dict[str, Any]:
    check_size("chat_parameters", len(text), MAX_CHAT_CHARACTERS, "characters")
    return parse_json_fields(text or "{}", "", partial(RequestError, param="chat_parameters"))


def _boolean(fields: dict[str, Any], name: str, default: bool) -> bool:
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise RequestError("must be true or false", param=name)
    return default if value is None else value


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise RequestError("must be a list", param="tools")
    check_size("tools", len(tools), MAX_TOOLS, "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = _tool_name(tool, f"tools[{index}]")
        if name in names:
            raise RequestError(
                f"{name!r} occurs twice; give each tool its own name",
                param=f"tools[{index}].function.name",
            )
        names.add(name)
    return tuple({**_said(tool), "function": _said(tool["function"])} for tool in tools)


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `fields` of a tool for the prompt.

    null and `strict: false` are defaults and are dropped.
    """
    return {
        name: value
        for name, value in fields.items()
        if value is not None and name != CACHE_MARK and (name, value) != ("strict", False)
    }


def _tool_name(tool: Any, param: str) -> str:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError("must be 'function'", param=f"{param}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError("must be an object", param=f"{param}.function")
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII):
        raise RequestError(
            "must be 1 to 128 letters, digits, underscores, dots and dashes",
            param=f"{param}.function.name",
        )
    if not isinstance(function.get("description"), str | None):
        raise RequestError("must be a string", param=f"{param}.function.description")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError("must be true or false", param=f"{param}.function.strict")
    if not isinstance(function.get("parameters"), dict | None):
        raise RequestError("must be an object, a JSON schema", param=f"{param}.function.parameters")
    return name
