"""Calls of tools: what a model writes read as OpenAI's deltas, and enforced by grammar."""

from client.gateway.tool_calls.choice import ToolChoice
from client.gateway.tool_calls.format import Function, Node, ToolCallFormat
from client.gateway.tool_calls.formats import FORMATS
from client.gateway.tool_calls.stream import (
    AnswerDelta,
    AnswerStream,
    ContentDelta,
    Part,
    ReasoningDelta,
    ToolCallDelta,
)

__all__ = [
    "FORMATS",
    "AnswerDelta",
    "AnswerStream",
    "ContentDelta",
    "Function",
    "Node",
    "Part",
    "ReasoningDelta",
    "ToolCallDelta",
    "ToolCallFormat",
    "ToolChoice",
]
