"""TOOL_PARSERS: the parser of each form of tool calls, by the names of vLLM's parsers.

The server takes these names as `tool_call_parser`, and no others: `TOOL_CALLS` of its tags.
"""

from __future__ import annotations

from collections.abc import Mapping

from client.gateway.tool_parsers.harmony import Harmony
from client.gateway.tool_parsers.hermes import Hermes
from client.gateway.tool_parsers.llama3_json import Llama3Json
from client.gateway.tool_parsers.mistral import Mistral
from client.gateway.tool_parsers.pythonic import Pythonic
from client.gateway.tool_parsers.qwen3_coder import Qwen3Coder
from client.gateway.tool_parsers.tool_parser import ToolParser

TOOL_PARSERS: Mapping[str, ToolParser] = {
    "ernie45": Hermes(),
    "granite4": Hermes(),
    "hermes": Hermes(),
    "lfm2": Pythonic(begin="<|tool_call_start|>", end="<|tool_call_end|>"),
    "llama3_json": Llama3Json(),
    "llama4_json": Llama3Json(),
    "llama4_pythonic": Pythonic(begin="<|python_start|>", end="<|python_end|>"),
    "mistral": Mistral(),
    "openai": Harmony(),
    "pythonic": Pythonic(),
    "qwen3_coder": Qwen3Coder(),
    "qwen3_xml": Qwen3Coder(),
}
