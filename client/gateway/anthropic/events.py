"""Answers of Anthropic's API, and the events of which a stream consists."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Raw, Struct, UnsetType


class MessageTokensDetails(Struct):
    """`thinking_tokens`: those of thinking, with the tag that opens it."""

    thinking_tokens: int


class MessageUsage(Struct):
    """Tokens of a request: the prompt has all of the first three.

    `input_tokens` were computed, `cache_read_input_tokens` came from the prefix cache. Nothing
    is written to it but what is computed anyway: `cache_creation_input_tokens` is 0.
    """

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: MessageTokensDetails | UnsetType = UNSET
    service_tier: str = "standard"


class TextBlock(Struct, tag="text"):
    """A text."""

    text: str = ""


class ThinkingBlock(Struct, tag="thinking"):
    """Reasoning. The signature is a checksum, or has what the client asked to omit."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    """A call of a tool; `input` is JSON, an object."""

    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class AnsweredMessage(Struct, tag="message"):
    """An answer; at the start of a stream it is empty."""

    id: str
    model: str
    content: list[Block]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"


class TextBlockDelta(Struct, tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    """More of the thinking."""

    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    """The signature, at the end of the thinking."""

    signature: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    """More of the JSON text of a call's input."""

    partial_json: str


class ContentBlockStart(Struct, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: Block


class ContentBlockDelta(Struct, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextBlockDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Struct, tag="content_block_stop"):
    """A block has ended."""

    index: int


BlockEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop


class MessageStart(Struct, tag="message_start"):
    """The answer begins."""

    message: AnsweredMessage


class Ping(Struct, tag="ping"):
    """Nothing has happened."""


class Stop(Struct):
    """Why there is no more."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta"):
    """The answer is complete; `usage` is that of all of it."""

    delta: Stop
    usage: MessageUsage


class MessageStop(Struct, tag="message_stop"):
    """Nothing follows."""


MessageEvent = MessageStart | Ping | BlockEvent | MessageDelta | MessageStop
EVENTS = (
    MessageStart,
    Ping,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
)


class TokenCount(Struct):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int
