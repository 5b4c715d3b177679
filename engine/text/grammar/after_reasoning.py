"""A grammar that begins where the reasoning ends."""

from __future__ import annotations

from engine.text.grammar.spec import GrammarSpec
from engine.text.output_parsing.parser import ParserState
from engine.text.output_parsing.parser_spec import ParserSpec

_IN_HARMONY = {
    "reasoning_start": "<|channel|>analysis<|message|>",
    "begin_after": "<|end|><|start|>assistant",
    "opening": "<|channel|>final<|message|>",
}


def after_reasoning(
    spec: GrammarSpec, parser_spec: ParserSpec, parser_state: ParserState
) -> GrammarSpec:
    """Return `spec` for an output that begins at `parser_state`, where reasoning may come first.

    In reasoning that the prompt has opened, the output is free up to its end; before any tag of the
    turn, reasoning may be opened. gpt-oss opens the answer by a header. A spec with a `begin_after`
    of its own stays as it is, and so do structural tags that write the headers of gpt-oss.
    """
    if spec.begin_after:
        return spec
    state = parser_spec.states[parser_state.state]
    if state.kind == "header":
        return spec if spec.kind == "structural_tag" else spec.model_copy(update=_IN_HARMONY)
    if state.kind == "reasoning":
        return spec.model_copy(update={"begin_after": state.end_tag})
    for tag, number in state.next.items():
        opened = parser_spec.states[number]
        if opened.kind == "reasoning" and parser_state.number == 0:
            return spec.model_copy(update={"reasoning_start": tag, "begin_after": opened.end_tag})
    return spec
