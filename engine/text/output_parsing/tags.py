"""The tags around reasoning and tool calls, by the names that vLLM's parsers have for families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["content", "reasoning", "tool_call"]


class Tags(NamedTuple):
    """What opens a kind of section, and what closes it.

    Without `ends` it goes on to the end of the sequence, or to its next start.

    Attributes:
        quotes: what may stand around a string in it: a tag in a string closes nothing.
    """

    kind: Kind
    starts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    quotes: str = ""


_THINK = Tags("reasoning", ("<think>",), ("</think>",))
_RESPONSE = Tags("content", ("<response>",), ("</response>",))
_TOOL_CALL = Tags("tool_call", ("<tool_call>",), ("</tool_call>",), quotes='"')
# Qwen3-Coder often leaves out what opens a call; where there is this tag, calls are no JSON.
FUNCTION = Tags("tool_call", ("<function=",), _TOOL_CALL.ends)
_PYTHON_TAG = Tags("tool_call", ("<|python_tag|>",), quotes='"')
_BAR = "\N{FULLWIDTH VERTICAL LINE}"

# gpt-oss: a message is a header, which names the channel of the text after <|message|>, and that
# text.
HARMONY = (
    Tags("content", ("<|start|>", "<|channel|>"), ("<|message|>",)),
    Tags("content", (), ("<|end|>", "<|call|>", "<|return|>")),
)

REASONING: Mapping[str, tuple[Tags, ...]] = {
    "cohere_command3": (
        Tags("reasoning", ("<|START_THINKING|>",), ("<|END_THINKING|>",)),
        Tags("content", ("<|START_RESPONSE|>",), ("<|END_RESPONSE|>",)),
    ),
    "deepseek_r1": (_THINK,),
    "ernie45": (_THINK, _RESPONSE),
    "glm45": (_THINK,),
    "granite": (
        Tags(
            "reasoning",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
        _THINK,
        _RESPONSE,
    ),
    "hunyuan_a13b": (_THINK, Tags("content", ("<answer>",), ("</answer>",))),
    "kimi": (Tags("reasoning", ("◁think▷",), ("◁/think▷",)),),
    "kimi_k2": (_THINK,),
    "minimax_m2": (_THINK,),
    "mistral": (Tags("reasoning", ("[THINK]",), ("[/THINK]",)),),
    "nemotron_v3": (_THINK,),
    "olmo3": (_THINK,),
    "openai_gptoss": HARMONY,
    "qwen3": (_THINK,),
    "seed_oss": (Tags("reasoning", ("<seed:think>",), ("</seed:think>",)),),
    "step3": (_THINK,),
}

# The gateway has a `ToolParser` for each of these names, and for no other. `pythonic` writes calls
# without tags: there is nothing to mark.
TOOL_CALLS: Mapping[str, tuple[Tags, ...]] = {
    "ernie45": (_TOOL_CALL,),
    "granite4": (_TOOL_CALL,),
    "hermes": (_TOOL_CALL,),
    "lfm2": (Tags("tool_call", ("<|tool_call_start|>",), ("<|tool_call_end|>",), quotes="\"'"),),
    "llama3_json": (_PYTHON_TAG,),
    "llama4_json": (_PYTHON_TAG,),
    "llama4_pythonic": (
        Tags("tool_call", ("<|python_start|>",), ("<|python_end|>",), quotes="\"'"),
    ),
    "mistral": (Tags("tool_call", ("[TOOL_CALLS]",), quotes='"'),),
    "openai": HARMONY,
    "pythonic": (),
    "qwen3_coder": (_TOOL_CALL, FUNCTION),
    "qwen3_xml": (_TOOL_CALL, FUNCTION),
}
# Of families whose calls are marked as sections, but have no parser: Cohere, DeepSeek, Granite 3,
# Hunyuan and Jamba, InternLM, Kimi, MiniMax, OLMo, Phi, Seed-OSS, Step.
UNPARSED_TOOL_CALLS = (
    Tags("tool_call", ("<|START_ACTION|>",), ("<|END_ACTION|>",)),
    Tags("tool_call", (f"<{_BAR}tool▁calls▁begin{_BAR}>",), (f"<{_BAR}tool▁calls▁end{_BAR}>",)),
    Tags("tool_call", ("<|tool_call|>",)),
    Tags("tool_call", ("<tool_call>",)),
    Tags("tool_call", ("<tool_calls>",), ("</tool_calls>",), quotes='"'),
    Tags("tool_call", ("<|action_start|>",), ("<|action_end|>",)),
    Tags("tool_call", ("<|tool_calls_section_begin|>",), ("<|tool_calls_section_end|>",)),
    Tags("tool_call", ("<minimax:tool_call>",), ("</minimax:tool_call>",)),
    Tags("tool_call", ("<function_calls>",), ("</function_calls>",)),
    Tags("tool_call", ("<|tool_call|>",), ("<|/tool_call|>",)),
    Tags("tool_call", ("<seed:tool_call>",), ("</seed:tool_call>",)),
    Tags("tool_call", (f"<{_BAR}tool_calls_begin{_BAR}>",), (f"<{_BAR}tool_calls_end{_BAR}>",)),
)

AUTO = "auto"  # what the checkpoint has
NONE = "none"
