"""A request of `/v1/messages` as the chat that the server is asked, thinking included."""

from __future__ import annotations

import re
from typing import Any

from client.gateway.chat.effort import FIELD, switch_of
from client.gateway.chat.tools import refuse_too_many, tool_choice_of
from client.gateway.errors import ApiError, unsupported
from client.gateway.gateway import Gateway
from client.gateway.generation import Generation
from client.gateway.messages.conversation import Conversation
from client.gateway.schemas.messages import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingDisabled,
    ThinkingEnabled,
    Tool,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceTool,
)
from client.protocol import ChatParameters, Health

_SAMPLING = {
    "max_tokens": "max_tokens",
    "stop": "stop_sequences",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
}
_FORMAT = "output_config.format"
_TOOL = re.compile(r"\btools\[(\d+)\]")
# Fields of a chat, as they are called here.
_NAMES = (
    (re.compile(r"\b(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r" without prompt_logprobs\b"), ""),  # which are no field here
    (re.compile(r"^thinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), _FORMAT),
)

_EFFORTS = ("low", "medium", "high")  # that models are trained on
_DEFAULT_EFFORT = "high"  # Anthropic's: the same as none


def template_variables(body: CountTokensRequest, model: Health) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets.

    Raises:
        ApiError: the model cannot do what is asked for.
    """
    return {**_thinking(body, model), **_effort(body, model)}


def _thinking(body: CountTokensRequest, model: Health) -> dict[str, Any]:
    thinking = body.thinking
    if thinking is None:
        return {}
    if isinstance(thinking, ThinkingEnabled):
        if not model.has_reasoning:
            raise unsupported(
                "thinking.type", "enabled is not supported: the model has no known reasoning tags"
            )
        if isinstance(body, MessagesRequest):
            _check_budget(thinking.budget_tokens, body.max_tokens)
    is_on = not isinstance(thinking, ThinkingDisabled)
    if (switch := switch_of(model)) is not None:
        return {switch: is_on}
    if model.has_reasoning and not is_on:
        raise unsupported("thinking.type", "disabled is not supported: the model always thinks")
    return {}


def _check_budget(budget_tokens: int, max_tokens: int) -> None:
    if budget_tokens >= max_tokens:
        text = f"must be less than max_tokens ({max_tokens})"
        raise ApiError(text, param="thinking.budget_tokens")


def _effort(body: CountTokensRequest, model: Health) -> dict[str, Any]:
    effort = None if body.output_config is None else body.output_config.effort
    if effort is None:
        return {}
    if FIELD not in model.reasoning_switches:
        if effort == _DEFAULT_EFFORT:
            return {}
        raise unsupported("output_config.effort", f"only {_DEFAULT_EFFORT} with this model")
    if effort not in _EFFORTS:
        raise unsupported("output_config.effort", f"only {', '.join(_EFFORTS)} with this model")
    return {FIELD: effort}


class MessagesChat:
    """What the model is asked.

    Attributes:
        conversation: the messages.
        tool_choice: which tools may be called, and which must be.
        parameters: what the chat template gets beside the messages.
    """

    def __init__(self, body: CountTokensRequest, model: Health) -> None:
        """Check `body`, as far as that is not for the engine.

        Args:
            body: of the request.
            model: what there is to know of the model.

        Raises:
            ApiError: a field is wrong, or asks for what the model cannot do.
        """
        given = body.tools or []
        refuse_too_many(len(given))
        functions = [_function(tool) for tool in given]
        self.conversation = Conversation.of(
            body.system or (),
            body.messages,
            tools={tool.name: made for tool, made in zip(given, functions, strict=True)},
            takes_late_system=model.takes_late_system,
            kept_thinking=body.kept_thinking,
        )
        # What was found since is told where it was found, so that the prompt before stays the same.
        first = [place for place, tool in enumerate(given) if not tool.defer_loading]
        found = self.conversation.found_tools.difference(given[place].name for place in first)
        self._tool_places = [
            *first,
            *(place for place, tool in enumerate(given) if tool.name in found),
        ]
        tools = [functions[place] for place in self._tool_places]
        choice = body.tool_choice
        if isinstance(choice, ToolChoiceAny) and not given:
            raise ApiError("any needs tools", param="tool_choice")
        is_parallel = (
            choice is None
            or isinstance(choice, ToolChoiceNone)
            or not choice.disable_parallel_tool_use
        )
        try:
            self.tool_choice = tool_choice_of(tools, _choice(choice), is_parallel)
        except ApiError as error:
            raise self.renamed(error) from None
        self.parameters: ChatParameters = {}
        if tools and self.tool_choice.mode != "none":
            self.parameters["tools"] = tools[: len(first)] or tools
        if self.conversation.is_continued:
            self.parameters["continue_final_message"] = True
        if variables := template_variables(body, model):
            self.parameters["chat_template_kwargs"] = variables

    @classmethod
    async def asked(cls, gateway: Gateway, body: CountTokensRequest) -> MessagesChat:
        """Return what a request asks of the model that a gateway serves.

        Raises:
            ApiError: as above; or there is no such model, or no server answers.
        """
        gateway.model_named(body.model)
        return cls(body, await gateway.served_model.facts())

    def generation(self, body: MessagesRequest, request_id: str) -> Generation:
        """Return the request for the server."""
        given = ((name, getattr(body, field)) for name, field in _SAMPLING.items())
        sampling = {name: value for name, value in given if value is not None}
        sampling["return_sections"] = True
        if isinstance(body.thinking, ThinkingEnabled):
            sampling["thinking_token_budget"] = body.thinking.budget_tokens
        if body.output_config is not None and (form := body.output_config.format) is not None:
            schema = {"name": "answer", "schema": form.json_schema, "strict": True}
            sampling["response_format"] = {"type": "json_schema", "json_schema": schema}
        return Generation(
            request_id,
            sampling,
            messages=self.conversation.messages,
            chat_parameters=self.parameters or None,
            names={"stop": "stop_sequences"},
        )

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error with fields named as the client named them."""
        figures = error.figures
        if error.code == "context_length_exceeded" and "max_model_len" in figures:
            # In Anthropic's words, by which clients know that they have to shorten it.
            size = figures.get("num_tokens") or f"more than {figures['more_than']}"
            limit = figures["max_model_len"]
            return error.reworded(f"prompt is too long: {size} tokens > {limit} maximum", ())
        message, *params = map(self._renamed, (error.message, *error.params))
        if any(param.startswith(_FORMAT) for param in params):
            message = message.replace(', or send "strict": false', "")  # it is always strict
        return error.reworded(message, params)

    def _renamed(self, text: str) -> str:
        for pattern, name in _NAMES:
            text = pattern.sub(name, text)
        return self.conversation.placed(_TOOL.sub(self._tool_placed, text))

    def _tool_placed(self, found: re.Match[str]) -> str:
        index = int(found[1])
        return f"tools[{self._tool_places[index]}]" if index < len(self._tool_places) else found[0]


def _function(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(
    choice: ToolChoiceNone | ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | None,
) -> Any:
    """Return `tool_choice` in OpenAI's form."""
    match choice:
        case None:
            return None
        case ToolChoiceTool(name=name):
            return {"type": "function", "function": {"name": name}}
        case ToolChoiceAny():
            return "required"
        case _:
            return choice.type
