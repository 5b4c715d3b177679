"""`/v1/messages`: what a conversation consists of, as clients send it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from client.gateway.schemas.omitted_thinking import omitted_thinking
from client.gateway.schemas.sampling import Fields, unsupported
from client.gateway.schemas.unions import Key

NotOffered = Annotated[None, unsupported("is not offered here")]


TYPE = Key("type")
ROLE = Key("role")


def _as_blocks(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of blocks")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


# The one name of an input that is no JSON object: the form that Anthropic advises for what its
# tools stream unchecked.
INVALID_JSON = "INVALID_JSON"


def _as_input(value: Any) -> Any:
    return {INVALID_JSON: value} if isinstance(value, str) else value


class CacheControl(Fields):
    """Without effect: prefixes are cached whether they are marked or not."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class TextBlock(Fields):
    """A text; what the client has made of it says nothing to the model."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None
    parsed_output: Any = None


class Caller(Fields):
    """Who has called a tool: the model itself."""

    type: Literal["direct"]


class ToolUseBlock(Fields):
    """A call of a tool, by the model. An input that is no JSON may be as it was streamed."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[
        dict[str, Any],
        BeforeValidator(_as_input, json_schema_input_type=dict[str, Any] | str),
    ]
    caller: Caller | None = None
    cache_control: CacheControl | None = None
    toolset_name: NotOffered = None

    @property
    def arguments(self) -> dict[str, Any] | str:
        """The input; if it is no JSON, as the model wrote it."""
        text = self.input.get(INVALID_JSON)
        return text if isinstance(text, str) and len(self.input) == 1 else self.input


class ThinkingBlock(Fields):
    """Reasoning of the model; nothing is signed. What was omitted is in the signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    @property
    def text(self) -> str:
        """What was thought; empty if it was omitted elsewhere."""
        return self.thinking or omitted_thinking(self.signature or "")


class RedactedThinkingBlock(Fields):
    """Reasoning that Anthropic alone can read: left out."""

    type: Literal["redacted_thinking"]
    data: str


_Text = Annotated[TextBlock, Tag("<text>")]
_Texts = list[Annotated[_Text, TYPE.discriminator, TYPE.only("text")]]
Texts = Annotated[_Texts, BeforeValidator(_as_blocks, json_schema_input_type=str | _Texts)]


class ToolReferenceBlock(Fields):
    """A tool that the client's own search has found: one with `defer_loading`."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl | None = None


_ResultBlocks = list[
    Annotated[
        _Text | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
        TYPE.discriminator,
        TYPE.only("text", "tool_reference"),
    ]
]


class ToolResultBlock(Fields):
    """What a tool gave back."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            _ResultBlocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _ResultBlocks)
        ]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: NotOffered = None


_UserBlocks = list[
    Annotated[
        _Text | Annotated[ToolResultBlock, Tag("<tool_result>")],
        TYPE.discriminator,
        TYPE.only("text", "tool_result"),
    ]
]
_AssistantBlocks = list[
    Annotated[
        _Text
        | Annotated[ToolUseBlock, Tag("<tool_use>")]
        | Annotated[ThinkingBlock, Tag("<thinking>")]
        | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
        TYPE.discriminator,
        TYPE.only("text", "tool_use", "thinking", "redacted_thinking"),
    ]
]


class UserMessage(Fields):
    """What the user says, and what tools gave back."""

    role: Literal["user"]
    content: Annotated[
        _UserBlocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _UserBlocks)
    ]


class AssistantMessage(Fields):
    """What the model said. As the last message it is continued."""

    role: Literal["assistant"]
    content: Annotated[
        _AssistantBlocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _AssistantBlocks)
    ]


class SystemMessage(Fields):
    """Instructions in the course of a conversation."""

    role: Literal["system"]
    content: Texts


MessageParam = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    ROLE.discriminator,
    ROLE.only("user", "assistant", "system"),
]
