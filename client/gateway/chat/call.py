"""Chats: a request of `/v1/chat/completions` to one of the server, and the answer back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from msgspec import UNSET

from client.gateway.chat.answer import ChatAnswer
from client.gateway.chat.request import generation_of
from client.gateway.chat.tools import tool_choice_of
from client.gateway.gateway import Gateway
from client.gateway.logprobs import LogprobCount, chat_logprobs, prompt_logprobs
from client.gateway.schemas.answers import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    Function,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)
from client.gateway.schemas.chat import ChatRequest
from client.gateway.tool_calls import AnswerDelta
from client.protocol import Chunk


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
