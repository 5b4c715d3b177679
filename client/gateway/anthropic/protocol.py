"""Bodies of requests of Anthropic's API."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from client.gateway.schemas.sampling import Fields, Yes, fault, unsupported
from client.gateway.schemas.unions import Key

_MARK = "omitted."


def signature_of(thinking: str) -> str:
    """Return the signature of a block whose thinking is left out."""
    return _MARK + base64.b64encode(thinking.encode()).decode()


def omitted_thinking(signature: str) -> str:
    """Return what was left out of the block with this signature; "" if it is none of ours."""
    mark, _, data = signature.partition(_MARK)
    try:
        return "" if mark else base64.b64decode(data, validate=True).decode()
    except ValueError:
        return ""


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
    """A text; `parsed_output` that a client adds is not passed to the model."""

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
    """A message of the user, and results of tools."""

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


MIN_BUDGET_TOKENS = 1024  # Anthropic's


class Tool(Fields):
    """A tool that the client runs.

    `eager_input_streaming` is how it always is here: input is streamed as the model writes it. With
    `defer_loading` the tool's definition is put into the prompt where a result refers to it.
    """

    type: Annotated[
        Literal["custom"] | None,
        unsupported("only custom tools are supported: the server runs no tools"),
    ] = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Yes | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: NotOffered = None


class ToolChoiceNone(Fields):
    """No tool may be called."""

    type: Literal["none"]


class ToolChoiceAuto(Fields):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(Fields):
    """A tool must be called."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(Fields):
    """This tool must be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


ToolChoiceParam = Annotated[
    Annotated[ToolChoiceNone, Tag("<none>")]
    | Annotated[ToolChoiceAuto, Tag("<auto>")]
    | Annotated[ToolChoiceAny, Tag("<any>")]
    | Annotated[ToolChoiceTool, Tag("<tool>")],
    TYPE.discriminator,
    TYPE.only("none", "auto", "any", "tool"),
]

# What is thought is sent as it is, not as a summary of its own; or left out.
Display = Literal["summarized", "omitted"] | None


class ThinkingEnabled(Fields):
    """The model thinks first."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=MIN_BUDGET_TOKENS)]
    display: Display = None


class ThinkingAdaptive(Fields):
    """The model thinks first if it can."""

    type: Literal["adaptive"]
    display: Display = None


class ThinkingDisabled(Fields):
    """The model does not think first."""

    type: Literal["disabled"]


Thinking = Annotated[
    Annotated[ThinkingEnabled, Tag("<enabled>")]
    | Annotated[ThinkingAdaptive, Tag("<adaptive>")]
    | Annotated[ThinkingDisabled, Tag("<disabled>")],
    TYPE.discriminator,
    TYPE.only("enabled", "adaptive", "disabled"),
]


class JsonOutputFormat(Fields):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    """What the answer is like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class AllThinking(Fields):
    """Of all turns."""

    type: Literal["all"]


class ThinkingTurns(Fields):
    """Of the newest turns that have some."""

    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class ClearThinking(Fields):
    """Which thinking is kept; what is older is left out. The default is Anthropic's."""

    type: Annotated[Literal["clear_thinking_20251015"], unsupported("is not offered here")]
    keep: Annotated[
        Literal["all"] | AllThinking | ThinkingTurns,
        fault('must be all or {"type": "thinking_turns", "value": at least 1}'),
    ] = ThinkingTurns(type="thinking_turns", value=1)


class ContextManagement(Fields):
    """Edits of the conversation by the server."""

    edits: list[ClearThinking] | None = None


class CountTokensRequest(Fields):
    """A conversation with its system prompt and tools."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: Texts | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Annotated[Literal["standard"] | None, unsupported("only standard is supported")] = None
    container: NotOffered = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def omits_thinking(self) -> bool:
        """Whether the answer has thinking only as far as it comes back."""
        thinking = self.thinking
        return not isinstance(thinking, ThinkingDisabled | None) and thinking.display == "omitted"

    @property
    def kept_thinking(self) -> int | None:
        """Of how many turns thinking is kept; None is all."""
        edits = (self.context_management and self.context_management.edits) or ()
        kept = [each.keep.value for each in edits if isinstance(each.keep, ThinkingTurns)]
        return min(kept, default=None)


def _no_thread(value: Any) -> Any:
    if value is not None:
        # By this type Anthropic's tool runner knows that it has to do without.
        text = "is not supported: send the whole conversation"
        raise PydanticCustomError("thread_unsupported_request", text)
    return value


class Metadata(Fields):
    """Without effect: it reports abuse to Anthropic."""

    user_id: str | None = None


class Diagnostics(Fields):
    """Without effect: Anthropic reports by it why a prefix was not in its cache."""

    previous_message_id: str | None = None


class MessagesRequest(CountTokensRequest):
    """A request for the next message of a conversation."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: Diagnostics | None = None
    inference_geo: NotOffered = None
    thread: Annotated[None, BeforeValidator(_no_thread)] = None
