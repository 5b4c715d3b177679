"""From the parts of an answer to the events of its blocks, and from these to the blocks."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator

import msgspec
from msgspec import Raw
from pydantic_core import from_json

from client.gateway.schemas.message_blocks import INVALID_JSON
from client.gateway.schemas.message_events import (
    Block,
    BlockEvent,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from client.gateway.schemas.omitted_thinking import signature_of
from client.gateway.tool_calls import ContentDelta, Part, ReasoningDelta, ToolCallDelta

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
