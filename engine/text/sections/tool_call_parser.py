"""In which form a checkpoint writes calls of tools: for clients that read or enforce them."""

from __future__ import annotations

from engine.text.sections.tags import AUTO, NONE
from engine.text.tokenizer import Tokenizer

# By what is in the chat template, all of it; the first that fits. Names as in `TOOL_CALLS`; the
# forms of GLM 4.5 and Jamba have no parser.
_SIGNS = (
    ("openai", ("<|channel|>", "<|message|>", "functions.")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    (NONE, ("<tool_call>", "<arg_key>")),
    (NONE, ("<tool_calls>",)),
    ("hermes", ("<tool_call>", '"arguments": ')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama3_json", ('{"name": function name, "parameters"',)),
    ("pythonic", ("[func_name1(",)),
)


def tool_call_parser(tokenizer: Tokenizer, setting: str) -> str:
    """Return the name of the form, as vLLM's parsers are called; `none` if it is not known.

    Args:
        tokenizer: with the chat template.
        setting: a name, or `auto`: told by the template.
    """
    if setting != AUTO:
        return setting
    template = tokenizer.chat_template_text
    fitting = (name for name, signs in _SIGNS if all(sign in template for sign in signs))
    return next(fitting, NONE) if "tools" in template else NONE
