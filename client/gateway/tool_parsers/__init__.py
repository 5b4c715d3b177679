"""Tool parsers: read the tool calls that a model writes as OpenAI's deltas, and enforce them."""

from client.gateway.tool_parsers.choice import ToolChoice
from client.gateway.tool_parsers.registry import TOOL_PARSERS
from client.gateway.tool_parsers.stream import (
    AnswerDelta,
    AnswerStream,
    ContentDelta,
    Part,
    ReasoningDelta,
    ToolCallDelta,
)
from client.gateway.tool_parsers.tool_parser import Function, Node, ToolParser

__all__ = [
    "TOOL_PARSERS",
    "AnswerDelta",
    "AnswerStream",
    "ContentDelta",
    "Function",
    "Node",
    "Part",
    "ReasoningDelta",
    "ToolCallDelta",
    "ToolChoice",
    "ToolParser",
]
