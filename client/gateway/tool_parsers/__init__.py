"""Calls of tools: what a model writes read as OpenAI's deltas, and enforced by grammar."""

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
