"""Chats: a request of `/v1/chat/completions` to one of the server, and the answer back."""

from __future__ import annotations

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
from client.gateway.logprobs import chat_logprobs, prompt_logprobs
from client.gateway.schemas.answers import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    Function,
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
        choices: dict[int, ChatChoice] = {}
        of_prompt: Any = UNSET
        async with aclosing(self._answer.pieces()) as pieces:
            async for chunk, added in pieces:
                choice = choices.setdefault(chunk.index, ChatChoice(chunk.index, ChatMessage(None)))
                _append(choice, self._choice(chunk, added))
                if chunk.prompt_logprobs is not None:
                    of_prompt = prompt_logprobs(chunk.prompt_logprobs)
        for choice in choices.values():
            if choice.message.tool_calls is UNSET:
                choice.message.content = choice.message.content or ""
        return ChatCompletion(
            self._id,
            self._created,
            self._model,
            [choices[index] for index in sorted(choices)],
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


def _append(choice: ChatChoice, piece: ChunkChoice) -> None:
    message, delta = choice.message, piece.delta
    if delta.content is not UNSET:
        message.content = (message.content or "") + delta.content
    if delta.reasoning_content is not UNSET:
        before = "" if message.reasoning_content is UNSET else message.reasoning_content
        message.reasoning_content = message.reasoning = before + delta.reasoning_content
    if delta.tool_calls is not UNSET:
        _append_calls(message, delta.tool_calls)
    choice.finish_reason = piece.finish_reason
    if piece.logprobs is not None:
        if choice.logprobs is None:
            choice.logprobs = piece.logprobs
        else:
            choice.logprobs.content.extend(piece.logprobs.content)


def _append_calls(message: ChatMessage, deltas: list[ToolCallDelta]) -> None:
    calls = [] if message.tool_calls is UNSET else message.tool_calls
    for delta in deltas:
        if delta.id is not UNSET:
            function = Function(delta.function.arguments, delta.function.name)
            calls.append(ToolCall(delta.id, function))
        else:
            calls[delta.index].function.arguments += delta.function.arguments
    message.tool_calls = calls
