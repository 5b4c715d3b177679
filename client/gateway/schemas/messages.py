"""`/v1/messages` and `/v1/messages/count_tokens`: the bodies of requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from client.gateway.schemas.message_blocks import (
    TYPE,
    CacheControl,
    MessageParam,
    NotOffered,
    Texts,
)
from client.gateway.schemas.sampling import Fields, Yes, fault, unsupported

MIN_BUDGET_TOKENS = 1024  # Anthropic's


class Tool(Fields):
    """A tool that the client runs.

    `eager_input_streaming` is how it always is here: input is streamed as the model writes it. With
    `defer_loading` the model is told of the tool when a result refers to it.
    """

    type: Annotated[
        Literal["custom"] | None, unsupported("only custom tools are offered: the server runs none")
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
    """A conversation, and what the model is told beside it."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: Texts | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Annotated[Literal["standard"] | None, unsupported("only standard is offered")] = None
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
    """Without effect: it tells Anthropic about abuse."""

    user_id: str | None = None


class Diagnostics(Fields):
    """Without effect: by it Anthropic tells why a prefix was not in its cache."""

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
