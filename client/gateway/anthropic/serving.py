"""Serves `/v1/messages`: the chat that the server is asked, and the answer as blocks."""

from __future__ import annotations

import hashlib
import json
import re
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import UNSET, Raw
from pydantic_core import from_json

from client.gateway.anthropic.conversation import Conversation
from client.gateway.anthropic.events import (
    AnsweredMessage,
    Block,
    BlockEvent,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageTokensDetails,
    MessageUsage,
    Ping,
    SignatureDelta,
    Stop,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from client.gateway.anthropic.protocol import (
    INVALID_JSON,
    CountTokensRequest,
    MessagesRequest,
    ThinkingDisabled,
    ThinkingEnabled,
    Tool,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceTool,
    signature_of,
)
from client.gateway.errors import ApiError, unsupported
from client.gateway.gateway import Gateway
from client.gateway.generation import Generation
from client.gateway.openai.serving_chat import FIELD, ChatAnswer, switch_of
from client.gateway.openai.tools import refuse_too_many, tool_choice_of
from client.gateway.tool_parsers import (
    AnswerDelta,
    ContentDelta,
    Part,
    ReasoningDelta,
    ToolCallDelta,
)
from client.protocol import ChatParameters, Chunk, Health

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
        raise unsupported("thinking.type", "disabled is not supported: the model always reasons")
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
        # Tools found since are defined where they were found, so that the prompt before stays the
        # same.
        first = [index for index, tool in enumerate(given) if not tool.defer_loading]
        found = self.conversation.found_tools.difference(given[index].name for index in first)
        self._tool_indices = [
            *first,
            *(index for index, tool in enumerate(given) if tool.name in found),
        ]
        tools = [functions[index] for index in self._tool_indices]
        choice = body.tool_choice
        if isinstance(choice, ToolChoiceAny) and not given:
            raise ApiError("any needs tools; add tools, or leave it out", param="tool_choice")
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
        return (
            f"tools[{self._tool_indices[index]}]" if index < len(self._tool_indices) else found[0]
        )


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


# After so long without an event a stream sends a ping: clients and proxies give up at some
# time.
_QUIET_S = 10.0
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}

_NO_INPUT = Raw(b"{}")


class BlockStream:
    """Begins and ends blocks, one at a time, as the parts of an answer come."""

    def __init__(self, *, omits_thinking: bool = False) -> None:
        """Begin with no block; with `omits_thinking`, blocks of it have a signature alone."""
        self._omits_thinking = omits_thinking
        self._open: Block | None = None
        self._index = -1
        self._thinking: list[str] = []

    def add(self, part: Part) -> Iterator[BlockEvent]:
        """Yield the events of the next part."""
        match part:
            case ToolCallDelta():
                if part.id:
                    yield from self._begin(ToolUseBlock(part.id, part.name, _NO_INPUT))
                if part.arguments:
                    yield ContentBlockDelta(self._index, InputJsonDelta(part.arguments))
            case ContentDelta(text) if text:
                if not isinstance(self._open, TextBlock):
                    yield from self._begin(TextBlock())
                yield ContentBlockDelta(self._index, TextBlockDelta(text))
            case ReasoningDelta(text) if text:
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._begin(ThinkingBlock())
                self._thinking.append(text)
                if not self._omits_thinking:
                    yield ContentBlockDelta(self._index, ThinkingDelta(text))

    def end(self) -> Iterator[BlockEvent]:
        """Yield the last events of the block that is open, if one is."""
        if self._open is None:
            return
        if isinstance(self._open, ThinkingBlock):
            yield ContentBlockDelta(self._index, SignatureDelta(self._signature()))
            self._thinking = []
        yield ContentBlockStop(self._index)
        self._open = None

    def _signature(self) -> str:
        thinking = "".join(self._thinking)
        if self._omits_thinking:
            return signature_of(thinking)
        return b64encode(hashlib.sha256(thinking.encode()).digest()).decode()

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        yield from self.end()
        self._open = block
        self._index += 1
        yield ContentBlockStart(self._index, block)


class BlockList:
    """Puts blocks together from their events, as clients do.

    Attributes:
        blocks: so far; the last one may be incomplete.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._texts: list[str] = []

    def add(self, event: BlockEvent) -> None:
        """Take the next event."""
        match event:
            case ContentBlockStart(_, block):
                self.blocks.append(msgspec.structs.replace(block))
                self._texts = []
            case ContentBlockDelta(_, SignatureDelta(signature)):
                block = self.blocks[-1]
                assert isinstance(block, ThinkingBlock)
                block.signature = signature
            case ContentBlockDelta(
                _, TextBlockDelta(text) | ThinkingDelta(text) | InputJsonDelta(text)
            ):
                self._texts.append(text)
            case ContentBlockStop():
                self._complete(self.blocks[-1], "".join(self._texts))

    @staticmethod
    def _complete(block: Block, text: str) -> None:
        match block:
            case TextBlock():
                block.text = text
            case ThinkingBlock():
                block.thinking = text
            case ToolUseBlock():
                block.input = tool_input(text)


def tool_input(arguments: str) -> Raw:
    """Return the arguments of a call as a JSON object.

    Of arguments that were cut off it has what Anthropic's clients read of them in a stream. What is
    no object of JSON is `{"INVALID_JSON": arguments}`, which goes back to the model as it wrote it.
    """
    for is_partial in (False, True):
        try:
            value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=is_partial)
        except ValueError:
            continue
        if isinstance(value, dict):
            return Raw((json.dumps(value) if is_partial else arguments or "{}").encode())
        break
    return Raw(msgspec.json.encode({INVALID_JSON: arguments}))


class MessageCall:
    """One request for the next message of a conversation."""

    def __init__(self, gateway: Gateway, body: MessagesRequest, chat: MessagesChat) -> None:
        """Take a request and what it asks of the model."""
        self._gateway = gateway
        self._model = body.model
        self._id = f"msg_{uuid4().hex}"
        self._chat = chat
        self._generation = chat.generation(body, self._id)
        self._omits_thinking = body.omits_thinking
        self._has_max_tokens = True  # else it ends with the model's context

    async def answer(self) -> AnsweredMessage:
        """Return the whole.

        Raises:
            ApiError: the server refuses it, or fails, or the answer was ended from outside.
        """
        made, content = None, BlockList()
        async with aclosing(self._events()) as events:
            async for event in events:
                match event:
                    case MessageStart(message):
                        made = message
                    case MessageDelta(stop, usage):
                        assert made is not None
                        made.stop_reason, made.stop_sequence = stop.stop_reason, stop.stop_sequence
                        made.usage = usage
                    case Ping() | MessageStop():
                        pass
                    case _:
                        content.add(event)
        if made is None:
            raise ApiError(
                "the server ended the request without an answer; try again", code="internal"
            )
        made.content = content.blocks
        return made

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as events; errors as in `answer`."""
        encode = self._gateway.encode_event
        async with aclosing(self._events()) as events:
            async for event in events:
                yield encode.named(str(event.__struct_config__.tag), event)

    async def _events(self) -> AsyncGenerator[MessageEvent, None]:
        blocks = BlockStream(omits_thinking=self._omits_thinking)
        told_at: float | None = None
        async with aclosing(self._pieces()) as pieces:
            async for answer, chunk, added in pieces:
                if told_at is None:
                    yield MessageStart(AnsweredMessage(self._id, self._model, [], _usage(answer)))
                if told_at is None or time.monotonic() - told_at > _QUIET_S:
                    yield Ping()
                    told_at = time.monotonic()
                for part in added.parts:
                    for event in blocks.add(part):
                        yield event
                        told_at = time.monotonic()
                if added.finish_reason is not None:
                    stop = self._stop(chunk, added.finish_reason)
                    for event in blocks.end():
                        yield event
                    yield MessageDelta(stop, _usage(answer))
                    yield MessageStop()

    async def _pieces(self) -> AsyncGenerator[tuple[ChatAnswer, Chunk, AnswerDelta], None]:
        """Yield the pieces of the answer, each with all of it so far.

        An answer for which the context has not enough room ends where that does.
        """
        try:
            async with aclosing(self._asked(self._generation)) as pieces:
                async for piece in pieces:
                    yield piece
        except ApiError as error:
            if (error.param, error.code) != ("max_tokens", "context_length_exceeded"):
                raise self._chat.renamed(error) from None
        else:
            return
        self._has_max_tokens = False
        given = self._generation.sampling.items()
        sampling = {name: value for name, value in given if name != "max_tokens"}
        async with aclosing(self._asked(replace(self._generation, sampling=sampling))) as pieces:
            async for piece in pieces:
                yield piece

    async def _asked(
        self, generation: Generation
    ) -> AsyncGenerator[tuple[ChatAnswer, Chunk, AnswerDelta], None]:
        answer = ChatAnswer(self._gateway, generation, self._chat.tool_choice)
        async with aclosing(answer.pieces()) as pieces:
            async for chunk, added in pieces:
                yield answer, chunk, added

    def _stop(self, chunk: Chunk, finish_reason: str) -> Stop:
        if finish_reason == "abort":
            raise ApiError("the answer was ended from outside", code="aborted")
        if isinstance(chunk.stop_reason, str):
            return Stop("stop_sequence", chunk.stop_reason)
        limit = "max_tokens" if self._has_max_tokens else "model_context_window_exceeded"
        return Stop(_STOP_REASONS.get(finish_reason, limit), None)


def _usage(answer: ChatAnswer) -> MessageUsage:
    usage = answer.usage.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    details = usage.completion_tokens_details
    return MessageUsage(
        usage.prompt_tokens - cached,
        cached,
        usage.completion_tokens,
        output_tokens_details=(
            UNSET if details is UNSET else MessageTokensDetails(details.reasoning_tokens)
        ),
    )
