"""Chat messages: checked as they come from the client, rendered with the checkpoint's template."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

from pydantic_core import from_json

from engine.errors import CheckpointError, RequestError, UnknownParameterError, UnsupportedError
from engine.json_reader import parse_json
from engine.text.chat_parameters import (
    CACHE_MARK,
    ChatParameters,
    reasoning_switches,
    spelled_out,
)
from engine.text.content_formats import TOOL, in_formats
from engine.text.plain_turns import (
    alternating_turns,
    plain_turns,
    short_call_ids,
    system_said_by_user,
)
from engine.text.tokenizer import Tokenizer
from engine.validation.checks import member
from engine.validation.limits import MAX_MESSAGES, check_size

_DEFAULTS = ChatParameters()
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
_FIELDS = frozenset({"role", "content", "tool_calls", *_TEXT_FIELDS})
# Fields of answers that clients send back; ignored if they are empty.
_OF_ANSWERS = (
    *("annotations", "audio", "function_call", "reasoning_details", "refusal"),
    *("thinking_blocks", "tool_calls"),
)
_OTHERS = "provider_specific_fields"  # LiteLLM's messages have there what it does not know
# Fields of answers, and the field that means the same to the model.
_REPEATED = {
    "parsed": "content",
    "thinking_blocks": "reasoning_content",
    "reasoning_details": "reasoning_content",
}
_MAX_PROBLEM = 300  # characters of a template's error
_PLAIN = [{"role": "user", "content": "a"}]
_MARK = re.compile(r"trident\d+mark")
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+', re.DOTALL)  # of JSON, without its end
_CONTROL = re.compile(r"[\x00-\x1f]")
_WRONG_ESCAPE = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_PART_TEXTS = {"text": "text", "refusal": "refusal"}  # fields of texts, by type of part


def parse_messages(text: str) -> list[dict[str, Any]]:
    """Return the chat messages in the JSON `text`, as `check_messages` does.

    Raises:
        RequestError, UnsupportedError: the text names the field, as `messages[1].content`.
    """
    messages = parse_json(text, "", partial(RequestError, param="messages"), finite=True)
    if isinstance(messages, list):
        check_size("messages", len(messages), MAX_MESSAGES, "messages")
    return check_messages(messages)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Validate untrusted `messages`; return them in the form that chat templates expect.

    Content given as OpenAI's list of text parts becomes one string, a part per line; arguments of
    tool calls given as JSON text are parsed, but left as they are where they are no object, as
    those of a call that was cut off: the prompt has them so; content that is missing beside them is
    empty, as many templates read it; the developer, of whom templates do not know, is the system;
    fields that are null, repeat another, or mark what to cache are removed, and empty ones of
    answers.

    Raises:
        UnsupportedError: a content part is not text.
        RequestError: anything else is wrong; the text names the field, as `messages[1].content`.
    """
    if not isinstance(messages, list):
        raise RequestError(f"must be a list (got {_kind(messages)})", param="messages")
    if not messages:
        raise RequestError("must not be empty", param="messages")
    checked = [_message(item, f"messages[{index}]") for index, item in enumerate(messages)]
    for index, message in enumerate(checked):
        _check_text(message, f"messages[{index}]")
    return checked


def render_text(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    parameters: ChatParameters = _DEFAULTS,
) -> str:
    """Return the prompt that the checkpoint's chat template makes of `messages`.

    What the template refuses, or leaves out, is put as it takes it: several calls of a turn follow
    one another, and content the reasoning; turns alternate, and calls have short ids; tools have
    the fields that the template reads.

    Raises:
        UnsupportedError: the template has no place for what `parameters` give it.
        RequestError: there is no template, or it refuses the messages or the tools, or leaves out
            a message's content.
        CheckpointError: the template itself is broken.
    """
    if not tokenizer.has_chat_template:
        raise RequestError("the model has no chat template; send text instead", param="messages")
    if any(isinstance(call["function"]["arguments"], str) for call in _calls(messages)):
        return _with_broken_calls(tokenizer, messages, parameters)
    parameters.check_template(tokenizer.chat_template_text)
    last = messages[-1]
    if parameters.continue_final_message and "tool_calls" in last and not last["content"]:
        raise RequestError("the last message has no content", param="continue_final_message")
    try:
        return _complete_prompt(tokenizer, messages, parameters)
    except RequestError as error:
        refusal = error
    usable = _usable_parameters(tokenizer, parameters)
    if usable is not parameters:
        try:
            return _complete_prompt(tokenizer, messages, usable)
        except RequestError as error:
            refusal = error
    alternating = alternating_turns(messages)
    for plainer in (
        plain_turns(messages),
        short_call_ids(messages),
        alternating,
        plain_turns(alternating),
    ):
        if plainer != messages:
            with suppress(RequestError):
                return _complete_prompt(tokenizer, plainer, usable)
    raise refusal


def _complete_prompt(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], parameters: ChatParameters
) -> str:
    """Return the prompt, if it shows the content of each message.

    Raises:
        RequestError: the template refuses the messages, or leaves one out.
    """
    prompt = _prompt(tokenizer, messages, parameters)
    left_out = _left_out(tokenizer, messages, parameters)
    if not left_out:
        return prompt
    if left_out == [0] and (said := system_said_by_user(messages)) != messages:
        return _complete_prompt(tokenizer, said, parameters)
    index = left_out[0]
    raise RequestError(
        "the model's chat template leaves out the content of role "
        f"{messages[index]['role'][:40]!r} here; put it into another message",
        param=f"messages[{index}].content",
    )


def _left_out(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], parameters: ChatParameters
) -> list[int]:
    """Return the indices of messages whose content the template does not show.

    Found out by rendering marks in place of the contents: the template may cut or rewrite a text
    that it shows. The model's text beside a call is not looked for; many templates drop it.
    """
    marks = {
        index: f"trident{index}mark"
        for index, message in enumerate(messages)
        if message["content"].strip() and "tool_calls" not in message
    }
    marked = [
        {**message, "content": marks.get(index, message["content"])}
        for index, message in enumerate(messages)
    ]
    try:
        prompt = _prompt(tokenizer, marked, parameters)
    except RequestError:
        return []  # it looks into the contents
    shown = set(_MARK.findall(prompt))
    return [index for index, mark in marks.items() if mark not in shown]


def _prompt(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], parameters: ChatParameters
) -> str:
    """Return what the chat template makes of `messages` just as they are.

    Raises:
        RequestError: the template refuses them, or fails on them.
        CheckpointError: the template itself is broken.
    """
    from jinja2 import TemplateError, TemplateSyntaxError  # only chats need it

    try:
        return tokenizer.apply_chat_template(
            in_formats(messages, tokenizer.content_formats),
            tools=[dict(tool) for tool in parameters.tools] or None,
            add_generation_prompt=parameters.add_generation_prompt,
            continue_final_message=parameters.continue_final_message,
            **parameters.chat_template_kwargs,
        )
    except TemplateSyntaxError as error:
        raise CheckpointError(f"chat template: line {error.lineno}: {error.message}") from None
    except TemplateError as error:
        raise RequestError(f"the chat template refuses them: {error}", param="messages") from None
    except Exception:  # the template works on the client's data and may fail in any way
        raise RequestError("the chat template cannot render them", param="messages") from None


def _usable_parameters(tokenizer: Tokenizer, parameters: ChatParameters) -> ChatParameters:
    """Return `parameters` with tools that the chat template can render beside a plain message.

    Raises:
        RequestError: the text names the tool, or the variable, that it cannot render.
    """

    def failure(tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> str:
        try:
            tokenizer.apply_chat_template(
                in_formats(_PLAIN, tokenizer.content_formats),
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                **kwargs,
            )
        except Exception as error:  # the template may fail in any way
            return f"{type(error).__name__}: {error}"[:_MAX_PROBLEM]
        return ""

    tools, kwargs = parameters.tools, parameters.chat_template_kwargs
    plain = [TOOL] if tools else []
    if not failure(plain, {}):
        for name, value in kwargs.items():
            if problem := failure(plain, {name: value}):
                param = member("chat_template_kwargs", name)
                raise RequestError(f"the chat template cannot render it: {problem}", param=param)
    elif not failure([], kwargs):
        raise RequestError(
            f"the chat template cannot render tools: {failure(plain, kwargs)}", param="tools"
        )
    if failure(plain, kwargs):  # it takes no plain message
        return parameters
    for made in (tools, *spelled_out(tools)):
        if not failure(made, kwargs):
            return parameters if made is tools else replace(parameters, tools=made)
    first, end = 0, len(made)
    while end - first > 1:
        middle = (first + end) // 2
        first, end = (first, middle) if failure(made[first:middle], kwargs) else (middle, end)
    problem = failure(made[first:end], kwargs)
    raise RequestError(f"the chat template cannot render it: {problem}", param=f"tools[{first}]")


def render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    parameters: ChatParameters = _DEFAULTS,
) -> list[int]:
    """Return the token ids of `render_text`; the template itself writes all special tokens."""
    prompt = render_text(tokenizer, messages, parameters)
    return tokenizer.encode(prompt, add_special_tokens=False)


class TemplateFacts(TypedDict):
    """What clients have to know of a chat template; fields as in `Ready` of the protocol."""

    reasoning_switches: list[str]
    takes_late_system: bool


def template_facts(tokenizer: Tokenizer) -> TemplateFacts:
    """Return what there is to know of the template."""
    return {
        "reasoning_switches": reasoning_switches(tokenizer.chat_template_text),
        "takes_late_system": _takes_late_system(tokenizer),
    }


def _takes_late_system(tokenizer: Tokenizer) -> bool:
    mark = "late instructions"
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": mark}]
    try:
        return mark in render_text(tokenizer, messages)
    except (RequestError, CheckpointError):
        return False


def _message(item: Any, param: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise RequestError(f"must be an object (got {_kind(item)})", param=param)
    given = _said(item, param)
    message = {
        name: value
        for name, value in given.items()
        if name != CACHE_MARK and _REPEATED.get(name) not in given
    }
    _refuse_others(message, _FIELDS, param)
    if not _text(message, "role", param):
        raise RequestError("must not be empty", param=f"{param}.role")
    if message["role"] == "developer":
        message["role"] = "system"
    for name in _TEXT_FIELDS:
        if name in message:
            _text(message, name, param)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{param}.tool_calls")
    if message["role"] == "assistant" and item.keys() & {"content", "tool_calls"}:
        message.setdefault("content", "")  # null; it called tools, or ended in its reasoning
    message["content"] = _content(message, param)
    return message


def _said(item: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Return the fields of a message that are set, under the names that templates use."""
    others = item.get(_OTHERS)
    if not isinstance(others, Mapping | None):
        raise RequestError(f"must be an object (got {_kind(others)})", param=f"{param}.{_OTHERS}")
    own = {**(others or {}), **item}
    given = {
        name: value
        for name, value in own.items()
        if value is not None and name != _OTHERS and not (name in _OF_ANSWERS and value in ("", []))
    }
    is_answer = given.get("role") == "assistant" and "tool_calls" not in given
    if is_answer and "content" not in given and "refusal" in given:
        given["content"] = given.pop("refusal")
    if "reasoning" in given:  # the name of OpenRouter and vLLM
        reasoning = _text(given, "reasoning", param)
        del given["reasoning"]
        given.setdefault("reasoning_content", reasoning)
    return given


def _refuse_others(fields: Mapping[str, Any], known: frozenset[str], param: str) -> None:
    for name, value in fields.items():
        if name not in known and value is not None:
            raise UnknownParameterError("unknown field", param=member(param, name))


def _content(message: dict[str, Any], param: str) -> str:
    parts = message.get("content")
    if not isinstance(parts, list):
        return _text(message, "content", param, allowed="a string or a list of parts")
    return "\n".join(_part(part, f"{param}.content[{i}]") for i, part in enumerate(parts))


def _part(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"must be an object (got {_kind(part)})", param=param)
    kind = _text(part, "type", param)
    if kind not in _PART_TEXTS:
        raise UnsupportedError(
            f"only text parts are supported (got {kind[:40]!r})", param=f"{param}.type"
        )
    text = _PART_TEXTS[kind]
    _refuse_others(part, frozenset({"type", text, CACHE_MARK}), param)
    return _text(part, text, param)


def _tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"must be a list (got {_kind(calls)})", param=param)
    return [_tool_call(call, f"{param}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise RequestError(f"must be an object (got {_kind(call)})", param=param)
    if call.get("type") not in (None, "function"):
        raise RequestError("must be 'function'", param=f"{param}.type")
    if call.get("id") is not None:
        _text(call, "id", param)
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"must be an object (got {_kind(function)})", param=f"{param}.function")
    _text(function, "name", f"{param}.function")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}  # many servers write none like this
    elif isinstance(arguments, str):
        parsed = _object(arguments)
        arguments = arguments if parsed is None else parsed
    if not isinstance(arguments, dict | str):
        raise RequestError(
            "must be an object or a string of JSON", param=f"{param}.function.arguments"
        )
    own = {name: value for name, value in function.items() if name != "parsed_arguments"}
    given = {name: value for name, value in call.items() if value is not None}
    return {**given, "function": {**own, "arguments": arguments}}


def _object(text: str) -> dict[str, Any] | None:
    """Return the object that a JSON text is; None if it is none that can be rendered."""
    try:
        value = parse_json(text, "arguments", RequestError, finite=True)
        json.dumps(value, ensure_ascii=False).encode()  # without a lone surrogate
    except (RequestError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _calls(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        yield from message.get("tool_calls", ())


def _with_broken_calls(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], parameters: ChatParameters
) -> str:
    """Return the prompt for messages with calls whose arguments are a text that is no JSON.

    For each of these texts an object of its own is rendered, in whose place the text then is. A
    template that writes arguments one by one gets what can be read of the texts.
    """
    mark = secrets.token_hex(16)
    texts: list[str] = []

    def marked(text: str) -> dict[str, Any]:
        texts.append(text)
        return {f"{mark}{len(texts) - 1}": ""}

    try:
        prompt = render_text(tokenizer, _with_objects(messages, marked), parameters)
    except RequestError:
        prompt = mark
    pattern = re.compile(rf'\{{\s*"{mark}(\d+)"\s*:\s*""\s*\}}')
    prompt = pattern.sub(lambda found: texts[int(found[1])], prompt)
    if mark in prompt:  # the template writes no JSON
        return render_text(tokenizer, _with_objects(messages, _readable), parameters)
    return prompt


def _with_objects(
    messages: list[dict[str, Any]], object_of: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return `messages` with objects for the arguments that are texts."""
    made = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                arguments = object_of(arguments)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        made.append({**message, "tool_calls": calls} if calls else message)
    return made


def _readable(text: str) -> dict[str, Any]:
    """Return what can be read of an object's text: up to where it was cut off, for instance.

    Line feeds and wrong escapes stand for themselves. What is no object at all is under one name,
    as in the gateway's answers of /v1/messages.
    """
    repaired = _STRING.sub(_repaired, text)
    try:
        value = from_json(repaired, allow_inf_nan=False, allow_partial="trailing-strings")
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _repaired(string: re.Match[str]) -> str:
    text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", string[0])
    return _WRONG_ESCAPE.sub(lambda found: found[0] if found[1] else "\\\\", text)


def _text(fields: dict[str, Any], name: str, param: str, *, allowed: str = "a string") -> str:
    if name not in fields:
        raise RequestError("is missing", param=f"{param}.{name}")
    value = fields[name]
    if not isinstance(value, str):
        raise RequestError(f"must be {allowed} (got {_kind(value)})", param=f"{param}.{name}")
    return value


def _check_text(message: dict[str, Any], param: str) -> None:
    """Refuse lone surrogates: the escape "\\ud800" is valid JSON, but not valid Unicode."""
    try:
        json.dumps(message, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            "holds a lone surrogate, which is not valid Unicode", param=param
        ) from None
    except (TypeError, ValueError, RecursionError):
        raise RequestError("holds a value that JSON cannot express", param=param) from None


def _kind(value: Any) -> str:
    """Name the JSON type of `value`."""
    if isinstance(value, bool):
        return "a boolean"
    kinds = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
