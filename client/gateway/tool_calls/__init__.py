"""Calls of tools: what a model writes read as OpenAI's deltas, and enforced by grammar."""

from client.gateway.tool_calls.choice import ToolChoice
from client.gateway.tool_calls.format import Function, Parsed, ToolCall, ToolCallFormat
from client.gateway.tool_calls.formats import FORMATS
from client.gateway.tool_calls.stream import AnswerStream, Delta, ToolCallDelta

__all__ = [
    "FORMATS",
    "AnswerStream",
    "Delta",
    "Function",
    "Parsed",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallFormat",
    "ToolChoice",
]
