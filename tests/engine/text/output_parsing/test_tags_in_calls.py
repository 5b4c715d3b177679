"""Tags in the arguments of a call, which close nothing, and calls whose first tag is missing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from tests.engine.text.output_parsing.test_families import FORMS, read, shorthand
from tests.factories.tagged import Form, format_of, tagged

TAGS = ("<tool_call>", "</tool_call>")
SPELT: tuple[Form, ...] = ("added", "text")  # no special tokens
TEXTS = st.lists(
    st.sampled_from([*TAGS, '"', "\\", "\n", "}", "a", "é", "</", "<parameter=", "<function="])
).map("".join)


def calls_in(detokenizer: Detokenizer, answer: str, name: str) -> list[tuple[str, str, str]]:
    return shorthand(read(detokenizer, answer, format_of(detokenizer, "none", name)))


@pytest.mark.parametrize("form", SPELT)
@given(arguments=st.dictionaries(TEXTS, TEXTS | st.lists(TEXTS, max_size=2), max_size=3))
def test_texts_of_json_may_have_any_tag(form: Form, arguments: dict[str, object]) -> None:
    call = f"\n{json.dumps({'name': 'f', 'arguments': arguments})}\n"
    answer = f"<tool_call>{call}</tool_call>\n<tool_call>{call}</tool_call> b"
    assert calls_in(tagged(TAGS, form), answer, "hermes") == [
        ("tool_call", "<tool_call>", call),
        ("content", "</tool_call>", "\n"),
        ("tool_call", "<tool_call>", call),
        ("content", "</tool_call>", " b"),
    ]


@pytest.mark.parametrize("form", SPELT)
@given(texts=st.lists(TEXTS, max_size=3))
def test_strings_of_python_may_have_any_tag(form: Form, texts: list[str]) -> None:
    tags = ("<|tool_call_start|>", "<|tool_call_end|>")
    values = [text.replace("<", tags[1]) for text in texts]
    call = f"[{', '.join(f'f(x={value!a})' for value in values)}]"
    answer = f"{tags[0]}{call}{tags[1]} b"
    assert calls_in(tagged(tags, form), answer, "lfm2") == [
        ("tool_call", tags[0], call),
        ("content", tags[1], " b"),
    ]


@pytest.mark.parametrize("form", SPELT)
def test_strings_of_mistral_may_have_the_tag_of_the_next_call(form: Form) -> None:
    tag = "[TOOL_CALLS]"
    calls = [f'f[ARGS]{{"x": "{tag}\\"{tag}"}}', 'g[ARGS]{"x": 1}']
    answer = "".join(f"{tag}{call}" for call in calls)
    assert calls_in(tagged((tag,), form), answer, "mistral") == [
        ("tool_call", tag, call) for call in calls
    ]


@pytest.mark.parametrize("form", SPELT)
@given(pieces=st.lists(st.sampled_from([*TAGS, '"', "'", "\\", "\n", "a", "</", "<function="])))
def test_values_of_qwen3_coder_may_have_any_tag(form: Form, pieces: list[str]) -> None:
    call = f"\n<function=f>\n<parameter=x>\n{''.join(pieces)}\n</parameter>\n</function>\n"
    answer = f"<tool_call>{call}</tool_call> b"
    assert calls_in(tagged(TAGS, form), answer, "qwen3_coder") == [
        ("tool_call", "<tool_call>", call),
        ("content", "</tool_call>", " b"),
    ]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '{"a": "</tool_call>"}'),
        ("qwen3_coder", "<function=f><parameter=x></tool_call></parameter></function>"),
    ],
)
def test_special_tokens_are_tags_everywhere(name: str, call: str) -> None:
    begun, _, rest = call.partition("</tool_call>")
    assert calls_in(tagged(TAGS, "special"), f"<tool_call>{call}", name) == [
        ("tool_call", "<tool_call>", begun),
        ("content", "</tool_call>", rest),
    ]


@pytest.mark.parametrize("form", SPELT)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '\n{"name": "f", "arguments": {"x": "a}}\n'),  # a quote is missing
        ("hermes", '\n{"name": "f", "arguments": {"x": "a\n"b" c"}}'),
        ("hermes", '\n{"name": "f", "arguments": {"x": "a\n\\"'),
        ("qwen3_coder", '\n<function=f>\n<parameter=x>\n5"\n</function>'),  # a tag is
        ("qwen3_coder", "\n<function=f>\n<parameter=x>\na\n</parameter>"),
    ],
)
def test_calls_that_are_wrong_end_with_their_tag(form: Form, name: str, call: str) -> None:
    answer = f"<tool_call>{call}</tool_call> b"
    assert calls_in(tagged(TAGS, form), answer, name) == [
        ("tool_call", "<tool_call>", call),
        ("content", "</tool_call>", " b"),
    ]


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
