"""Calls of tools: what a model writes read as OpenAI's deltas, and enforced by grammar."""

from client.gateway.tool_calls.choice import ToolChoice
from client.gateway.tool_calls.registry import TOOL_PARSERS
from client.gateway.tool_calls.stream import (
    AnswerDelta,
    AnswerStream,
    ContentDelta,
    Part,
    ReasoningDelta,
    ToolCallDelta,
)
from client.gateway.tool_calls.tool_parser import Function, Node, ToolParser

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
