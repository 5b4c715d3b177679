"""MessageCall: a request of `/v1/messages`, and the answer back."""

from __future__ import annotations

import hashlib
import json
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from uuid import uuid4

import msgspec
from msgspec import UNSET, Raw
from pydantic_core import from_json

from client.gateway.chat.answer import ChatAnswer
from client.gateway.errors import ApiError
from client.gateway.gateway import Gateway
from client.gateway.generation import Generation
from client.gateway.messages.chat import MessagesChat
from client.gateway.schemas.message_blocks import INVALID_JSON
from client.gateway.schemas.message_events import (
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
from client.gateway.schemas.messages import MessagesRequest
from client.gateway.schemas.omitted_thinking import signature_of
from client.gateway.tool_calls import AnswerDelta, ContentDelta, Part, ReasoningDelta, ToolCallDelta
from client.protocol import Chunk

# After so long without an event a stream says that it lives: clients and proxies give up at some
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
