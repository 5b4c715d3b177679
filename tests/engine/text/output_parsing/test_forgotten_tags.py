"""Calls of Qwen3-Coder without `<tool_call>`: the model often forgets it."""

from __future__ import annotations

import pytest

from tests.engine.text.output_parsing.test_families import FORMS, read, shorthand
from tests.factories.tagged import Form, format_of, tagged


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["auto", "qwen3_coder"])
def test_qwen3_coder_forgets_what_opens_a_call(form: Form, name: str) -> None:
    tags = ("<tool_call>", "</tool_call>")
    detokenizer = tagged(tags, form)
    if name == "auto":
        detokenizer = tagged((*tags, "<function=f>"), "text")
    answer = "Hm.\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g></tool_call>"
    assert shorthand(read(detokenizer, answer, format_of(detokenizer, "none", name))) == [
        ("content", "", "Hm.\n"),
        ("tool_call", "<function=", "f>\n</function>\n"),
        ("content", "</tool_call>", "\n"),
        ("tool_call", "<tool_call>", "\n<function=g>"),
        ("content", "</tool_call>", ""),
    ]


@pytest.mark.parametrize("form", ["special", "added"])
def test_a_call_may_begin_in_what_text_began(form: Form) -> None:
    detokenizer = tagged(("<tool_call>", "</tool_call>"), form)
    answer = "In <function=f>:\n<tool_call>\n<function=g></tool_call>"
    assert shorthand(read(detokenizer, answer, format_of(detokenizer, "none", "qwen3_coder"))) == [
        ("content", "", "In "),
        ("tool_call", "<function=", "f>:\n"),
        ("tool_call", "<tool_call>", "\n<function=g>"),
        ("content", "</tool_call>", ""),
    ]
