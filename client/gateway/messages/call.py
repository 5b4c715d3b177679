"""MessageCall: a request of `/v1/messages`, and the answer back."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from uuid import uuid4

from msgspec import UNSET

from client.gateway.chat.answer import ChatAnswer
from client.gateway.errors import ApiError
from client.gateway.gateway import Gateway
from client.gateway.generation import Generation
from client.gateway.messages.blocks import BlockList, BlockStream
from client.gateway.messages.chat import MessagesChat
from client.gateway.schemas.message_events import (
    AnsweredMessage,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageTokensDetails,
    MessageUsage,
    Ping,
    Stop,
)
from client.gateway.schemas.messages import MessagesRequest
from client.gateway.tool_calls import AnswerDelta
from client.protocol import Chunk

# After so long without an event a stream says that it lives: clients and proxies give up at some
# time.
_QUIET_S = 10.0
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}


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
            raise ApiError("the server ended the request without an answer", code="internal")
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
