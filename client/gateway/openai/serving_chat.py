"""Serves `/v1/chat/completions`: the request for the server, and the answer."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from msgspec import UNSET
from msgspec.structs import replace

from client.gateway.errors import ApiError, unsupported
from client.gateway.gateway import Gateway
from client.gateway.generation import Generation, UsageCount
from client.gateway.openai.logprobs import LogprobCount, chat_logprobs, prompt_logprobs
from client.gateway.openai.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    Delta,
    Function,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)
from client.gateway.openai.tools import tool_choice_of, with_calls
from client.gateway.schemas.tokens import TokenizeRequest
from client.gateway.tool_parsers import AnswerDelta, AnswerStream, ToolChoice
from client.protocol import ChatParameters, Chunk, Health

MAX_TOP_LOGPROBS = 20  # OpenAI's


def generation_of(body: ChatRequest, request_id: str) -> Generation:
    """Return the request for the server.

    Raises:
        ApiError: a field is wrong or not supported.
    """
    _check(body)
    sampling = body.sampling()
    sampling["return_sections"] = True
    max_tokens = (
        body.max_tokens if body.max_completion_tokens is None else (body.max_completion_tokens)
    )
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    completion = body.max_completion_tokens is not None
    names = {"logprobs": "top_logprobs"}
    return Generation(
        request_id,
        sampling,
        messages=body.messages,
        chat_parameters=chat_parameters(body, body.tools if body.tool_choice != "none" else None),
        priority=body.priority or 0,
        names=names | ({"max_tokens": "max_completion_tokens"} if completion else {}),
        reasoning_effort=body.reasoning_effort,
    )


def chat_parameters(
    body: ChatRequest | TokenizeRequest, tools: Sequence[Mapping[str, Any]] | None
) -> Any:
    """Return what the chat template gets beside the messages."""
    given = {
        "tools": tools,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    return {name: value for name, value in given.items() if value is not None}


def _check(body: ChatRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError("is allowed only if stream is true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "is not supported if stream is true")
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise ApiError(
            f"is {body.max_tokens}, but max_completion_tokens is {body.max_completion_tokens}; "
            "give only one of them",
            param="max_tokens",
        )
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise ApiError("is allowed only if logprobs is true", param="top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ApiError(f"must be 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")


FIELD = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")  # variables that switch it on and off

_OFF, _DEFAULT = "none", "medium"  # OpenAI's


def switch_of(model: Health) -> str | None:
    """Return the variable of the chat template that switches thinking on and off, if it has one."""
    return next((name for name in _SWITCHES if name in model.reasoning_switches), None)


def effort_variables(effort: str, model: Health) -> dict[str, Any]:
    """Return the variables of the chat template that an effort sets.

    Levels are the template's own affair. With a switch, `none` is off; if there are no levels,
    `medium`, OpenAI's default, is on. A model that has neither takes the one that it always does.

    Raises:
        ApiError: the model cannot do that.
    """
    switch = switch_of(model)
    if switch is not None and effort == _OFF:
        return {switch: False}
    if FIELD in model.reasoning_switches:
        return {FIELD: effort}
    if switch is not None and effort == _DEFAULT:
        return {switch: True}
    always = _DEFAULT if model.has_reasoning else _OFF
    if effort != always:
        allowed = always if switch is None else f"{_OFF} and {_DEFAULT}"
        raise unsupported(
            FIELD, f"only {allowed} with this model: its chat template has no levels of effort"
        )
    return {}


class ChatAnswer:
    """One request to the server, and what its pieces are: reasoning, content, calls of tools.

    Attributes:
        usage: tokens so far.
    """

    def __init__(self, gateway: Gateway, generation: Generation, tool_choice: ToolChoice) -> None:
        """Take a request with `messages` and the sampling parameter `return_sections`."""
        assert generation.sampling.get("return_sections"), "pieces are read from their sections"
        self.usage = UsageCount()
        self._gateway = gateway
        self._generation = generation
        self._tool_choice = tool_choice

    async def pieces(
        self, *, by_section: bool = False
    ) -> AsyncGenerator[tuple[Chunk, AnswerDelta], None]:
        """Yield the chunks and what each adds to the answer of its sequence, once.

        Closing or cancelling it ends the request.

        Args:
            by_section: give each section of a chunk as a chunk of its own.

        Raises:
            ApiError: a tool or an effort cannot be had, or the server refuses the request or fails.
        """
        generation, choice = await self._with_effort(), self._tool_choice
        answers = defaultdict[int, AnswerStream](AnswerStream)
        if choice.mode != "none":
            parser = await self._gateway.served_model.tool_parser()
            generation = with_calls(generation, choice, parser)
            answers = defaultdict(lambda: AnswerStream(parser, choice.functions))
        async with aclosing(generation.chunks(self._gateway.client)) as chunks:
            async for chunk in chunks:
                self.usage.add(0, chunk)
                answer = answers[chunk.index]
                for piece in _by_section(chunk) if by_section else (chunk,):
                    yield piece, answer.add(piece.sections or (), piece.finish_reason)

    async def _with_effort(self) -> Generation:
        generation = self._generation
        if generation.reasoning_effort is None:
            return generation
        model = await self._gateway.served_model.facts()
        made: ChatParameters = {**(generation.chat_parameters or {})}
        variables = effort_variables(generation.reasoning_effort, model)
        variables |= made.get("chat_template_kwargs", {})  # what is asked for by name goes before
        if variables:
            made["chat_template_kwargs"] = variables
        return dataclasses.replace(generation, chat_parameters=made)


def _by_section(chunk: Chunk) -> Iterator[Chunk]:
    """Yield the parts of `chunk`, with their own log-probabilities."""
    sections = chunk.sections or ()
    if len(sections) < 2:
        yield chunk
        return
    begin = 0
    for number, section in enumerate(sections, start=1):
        end = begin + section.num_tokens
        is_last = number == len(sections)
        yield replace(
            chunk,
            text=section.text,
            sections=(section,),
            logprobs=chunk.logprobs and chunk.logprobs[begin : None if is_last else end],
            finish_reason=chunk.finish_reason if is_last else None,
        )
        begin = end


class ChatCall:
    """One request to answer a chat."""

    def __init__(self, gateway: Gateway, body: ChatRequest) -> None:
        """Check `body`, as far as that is not for the engine.

        Raises:
            ApiError: a field is wrong or not supported.
        """
        self._gateway = gateway
        self._body = body
        self._model = gateway.model_named(body.model)
        self._id = f"chatcmpl-{uuid4().hex}"
        tool_choice = tool_choice_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        self._answer = ChatAnswer(gateway, generation_of(body, self._id), tool_choice)
        self._created = int(time.time())

    async def answer(self) -> ChatCompletion:
        """Return the whole.

        Raises:
            ApiError: the server refuses it, or fails.
        """
        choices: dict[int, _ChoiceBuilder] = {}
        of_prompt: Any = UNSET
        count = LogprobCount()
        async with aclosing(self._answer.pieces()) as pieces:
            async for chunk, added in pieces:
                choice = choices.setdefault(chunk.index, _ChoiceBuilder(chunk.index))
                if self._body.logprobs:
                    count.add("top_logprobs", chunk.logprobs or ())
                choice.add(self._choice(chunk, added))
                if chunk.prompt_logprobs is not None:
                    count.add("prompt_logprobs", chunk.prompt_logprobs)
                    of_prompt = await asyncio.to_thread(prompt_logprobs, chunk.prompt_logprobs)
        return ChatCompletion(
            self._id,
            self._created,
            self._model,
            [choices[index].choice() for index in sorted(choices)],
            self._answer.usage.usage(),
            prompt_logprobs=of_prompt,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as events; errors as in `answer`."""
        encode, body = self._gateway.encode_event, self._body
        usage: Any = None if body.include_usage else UNSET
        continuous_usage = body.continuous_usage
        begun: set[int] = set()
        async with aclosing(self._answer.pieces()) as pieces:
            async for chunk, added in pieces:
                if continuous_usage:
                    usage = self._answer.usage.usage()
                events = b""
                if chunk.index not in begun:
                    begun.add(chunk.index)
                    opening = ChunkChoice(chunk.index, Delta(role="assistant", content=""))
                    events = encode(self._piece([opening], usage))
                choice = self._choice(chunk, added)
                if choice != ChunkChoice(chunk.index, Delta()):
                    events += encode(self._piece([choice], usage))
                if events:  # sent together
                    yield events
        if body.include_usage:
            yield encode(self._piece([], self._answer.usage.usage()))

    def _piece(self, choices: list[ChunkChoice], usage: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(self._id, self._created, self._model, choices, usage=usage)

    def _choice(self, chunk: Chunk, added: AnswerDelta) -> ChunkChoice:
        return ChunkChoice(chunk.index, _delta(added), self._logprobs(chunk), added.finish_reason)

    def _logprobs(self, chunk: Chunk) -> ChatLogprobs | None:
        if not self._body.logprobs or chunk.logprobs is None:
            return None
        return chat_logprobs(
            chunk.logprobs,
            self._body.top_logprobs or 0,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )


def _delta(added: AnswerDelta) -> Delta:
    delta = Delta()
    if content := added.content:
        delta.content = content
    if reasoning := added.reasoning:
        delta.reasoning_content = delta.reasoning = reasoning
    if tool_calls := added.tool_calls:
        delta.tool_calls = [
            ToolCallDelta(
                call.index,
                Function(call.arguments, call.name or UNSET),
                call.id or UNSET,
                "function" if call.id else UNSET,
            )
            for call in tool_calls
        ]
    return delta


class _ChoiceBuilder:
    """Puts one choice together from its pieces; texts are joined once, at the end."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._finish_reason: str | None = None

    def add(self, piece: ChunkChoice) -> None:
        """Take the next piece."""
        delta = piece.delta
        if delta.content is not UNSET:
            self._content.append(delta.content)
        if delta.reasoning_content is not UNSET:
            self._reasoning.append(delta.reasoning_content)
        for call in () if delta.tool_calls is UNSET else delta.tool_calls:
            if call.id is not UNSET:
                self._calls.append((call, []))
            self._calls[call.index][1].append(call.function.arguments)
        if piece.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs.extend(piece.logprobs.content)
        self._finish_reason = piece.finish_reason

    def choice(self) -> ChatChoice:
        """Return the whole."""
        content = "".join(self._content)
        message = ChatMessage(content or None if self._calls else content)
        if self._reasoning:
            message.reasoning_content = message.reasoning = "".join(self._reasoning)
        if self._calls:
            message.tool_calls = [_whole_call(*each) for each in self._calls]
        logprobs = None if self._logprobs is None else ChatLogprobs(self._logprobs)
        return ChatChoice(self._index, message, logprobs, self._finish_reason)


def _whole_call(begin: ToolCallDelta, arguments: list[str]) -> ToolCall:
    assert begin.id is not UNSET
    return ToolCall(begin.id, Function("".join(arguments), begin.function.name))
