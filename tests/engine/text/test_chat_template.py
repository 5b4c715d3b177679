"""Chat messages from clients: checked by name, rendered by the checkpoint's template."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import CheckpointError, RequestError, UnsupportedError
from engine.text.chat_parameters import ChatParameters
from engine.text.chat_template import (
    check_messages,
    parse_messages,
    render,
    render_text,
    template_facts,
)
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from tests.engine.text.other_decoders import word_piece_tokenizer
from tests.factories.tokenizers import byte_level_tokenizer

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "3"}
CACHED = {"cache_control": {"type": "ephemeral"}}
THOUGHT = {"thinking_blocks": [{"thinking": "h"}], "reasoning_details": [{"text": "h"}]}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("messages", "parsed"),
    [
        ([USER], [USER]),
        ([{"role": "user", "content": ""}], [{"role": "user", "content": ""}]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}],
            [{"role": "user", "content": "a\na"}],
        ),
        ([{**USER, "name": "Ann", "tool_calls": None}], [{**USER, "name": "Ann"}]),
        (
            [{"role": "assistant", "content": None, "tool_calls": [call('{"x": 1}')]}],
            [{"role": "assistant", "content": "", "tool_calls": [call({"x": 1})]}],
        ),
        (
            [{"role": "tool", "content": "3", "tool_call_id": "1"}],
            [{"role": "tool", "content": "3", "tool_call_id": "1"}],
        ),
        (
            [{"role": "assistant", "content": "3", "reasoning_content": "1+2"}],
            [{"role": "assistant", "content": "3", "reasoning_content": "1+2"}],
        ),
        (
            [{"role": "developer", "content": "Be kind."}, USER],
            [{"role": "system", "content": "Be kind."}, USER],
        ),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
            [{"role": "assistant", "content": "No."}],
        ),
        (
            [{**USER, "content": [{"type": "text", "text": "a", **CACHED}], **CACHED}],
            [{**USER, "content": "a"}],
        ),
        (
            [{"role": "assistant", "content": "3", "tool_calls": []}],
            [{"role": "assistant", "content": "3"}],
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": []}],
            [{"role": "assistant", "content": ""}],
        ),
        (
            [{"role": "assistant", "content": '{"x": 1}', "parsed": {"x": 1}}],
            [{"role": "assistant", "content": '{"x": 1}'}],
        ),
        (
            [{"role": "assistant", "content": "3", "reasoning_content": "h", **THOUGHT}],
            [{"role": "assistant", "content": "3", "reasoning_content": "h"}],
        ),
    ],
)
def test_good_messages(messages: list[Any], parsed: list[Any]) -> None:
    assert parse_messages(json.dumps(messages)) == parsed


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"refusal": None, "annotations": [], "audio": None, "function_call": None}, {}),
        ({"parsed": None, "tool_calls": []}, {}),
        ({"thinking_blocks": [], "reasoning_details": []}, {}),
        ({"parsed": {"x": 1}}, {}),
        (
            {"reasoning": "h", "reasoning_details": [{"type": "reasoning.text", "text": "h"}]},
            {"reasoning_content": "h"},
        ),
        (
            {
                "reasoning_content": "h",
                "thinking_blocks": [{"type": "thinking", "thinking": "h"}],
                "provider_specific_fields": {"thinking_blocks": None},
            },
            {"reasoning_content": "h"},
        ),
    ],
)
def test_an_answer_is_taken_back_as_clients_have_it(
    more: dict[str, Any], kept: dict[str, Any]
) -> None:
    assert check_messages([{**ANSWER, **more}]) == [{**ANSWER, **kept}]


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        ({"reasoning_content": "h"}, {"content": "", "reasoning_content": "h"}),
        ({"reasoning": "h", "tool_calls": []}, {"content": "", "reasoning_content": "h"}),
        ({"tool_calls": []}, {"content": ""}),
        ({"refusal": "no"}, {"content": "no"}),
    ],
)
def test_an_answer_without_a_text_is_taken_back(
    answer: dict[str, Any], taken: dict[str, Any]
) -> None:
    given = {"role": "assistant", "content": None, **answer}
    assert check_messages([given]) == [{"role": "assistant", **taken}]


_NULLS = dict.fromkeys(
    (
        *("name", "refusal", "audio", "function_call", "tool_calls", "tool_call_id"),
        *("annotations", "reasoning", "reasoning_content", "parsed", "provider_specific_fields"),
    )
)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_fields_of_openai_that_are_null_say_nothing(role: str) -> None:
    given = {"role": role, "content": "a"}
    assert check_messages([{**given, **_NULLS}]) == check_messages([given])


def test_fields_of_a_call_that_are_null_say_nothing() -> None:
    nulls = {"id": None, "type": None, "index": None}
    given = {"function": {"name": "f", "arguments": "{}"}}
    plain, with_nulls = (
        check_messages([{"role": "assistant", "content": None, "tool_calls": [each]}])
        for each in (given, {**given, **nulls})
    )
    assert with_nulls == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"provider_specific_fields": []}, "provider_specific_fields: must be an object"),
        ({"reasoning": ["h"]}, "reasoning: must be a string"),
        ({"function_call": {"name": "f"}}, "function_call: unknown field"),
        ({"audio": {"id": "a"}}, "audio: unknown field"),
        ({"content": None, "parsed": {"x": 1}}, "parsed: unknown field"),
    ],
)
def test_fields_of_an_answer_that_are_wrong_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=rf"^messages\[0\]\.{param}"):
        check_messages([{**ANSWER, **fields}])


def test_a_message_without_content_is_none() -> None:
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content: is missing"):
        check_messages([{"role": "assistant"}])
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content: is missing"):
        check_messages([{"role": "user", "content": None}])


@pytest.mark.parametrize("arguments", ["", " \n", None])
def test_no_arguments_are_an_empty_object(arguments: str | None) -> None:
    [message] = check_messages([{"role": "assistant", "tool_calls": [call(arguments)]}])
    assert message["tool_calls"] == [call({})]


def test_arguments_that_a_client_has_parsed_are_left_out() -> None:
    given = call('{"x": 1}')
    given["function"]["parsed_arguments"] = {"x": 1}
    [message] = check_messages([{"role": "assistant", "tool_calls": [given]}])
    assert message["tool_calls"] == [call({"x": 1})]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ({}, "messages: must be a list"),
        ("hi", "messages: must be a list"),
        ([], "messages: must not be empty"),
        ([USER, "hi"], r"messages\[1\]: must be an object \(got a string\)"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role: is missing"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role: must not be empty"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\.role: must be a string"),
        ([USER, {"role": "user"}], r"messages\[1\]\.content: is missing"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content: is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content: must be a string or a list"),
        ([{"role": "user", "content": {}}], r"messages\[0\]\.content: must be .*an object"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content\[0\]: must be an object"),
        ([{"role": "user", "content": [{}]}], r"messages\[0\]\.content\[0\]\.type: is missing"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"messages\[0\]\.content\[0\]\.text: is missing",
        ),
        ([{**USER, "mood": "good"}], r"messages\[0\]\.mood: unknown field"),
        # What they repeat is not there.
        ([{**USER, **THOUGHT}], r"messages\[0\]\.thinking_blocks: unknown field"),
        (
            [{"role": "assistant", "tool_calls": [], "parsed": {}}],
            r"messages\[0\]\.parsed: unknown field",
        ),
        (
            [{**USER, "content": [{"type": "refusal", "text": "a"}]}],
            r"messages\[0\]\.content\[0\]\.text: unknown field",
        ),
        ([{**USER, "name": []}], r"messages\[0\]\.name: must be a string \(got a list\)"),
        ([{**USER, "tool_calls": {}}], r"messages\[0\]\.tool_calls: must be a list"),
        ([{**USER, "tool_calls": [1]}], r"messages\[0\]\.tool_calls\[0\]: must be an object"),
        ([{**USER, "tool_calls": [{}]}], r"messages\[0\]\.tool_calls\[0\]\.function: must be"),
        ([{**USER, "tool_calls": [{"type": "x"}]}], r"messages\[0\]\.tool_calls\[0\]\.type: "),
        ([{**USER, "tool_calls": [{"id": 1}]}], r"messages\[0\]\.tool_calls\[0\]\.id: "),
        ([{**USER, "a b\n": 1}], r'messages\[0\]\["a b\\n"\]: unknown field'),
        (
            [{**USER, "content": [{"type": "text", "text": "a", "x": 1}]}],
            r"messages\[0\]\.content\[0\]\.x: unknown field",
        ),
        ([{**USER, "tool_calls": [{"function": {}}]}], r"function\.name: is missing"),
        ([{**USER, "tool_calls": [call([])]}], r"function\.arguments: must be an object"),
        ([{**USER, "tool_calls": [call("\ud800")]}], r"messages\[0\]: holds a lone surrogate"),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\]: holds a lone surrogate"),
        ([USER, {**USER, "tool_calls": [call({"\ud800": 1})]}], r"messages\[1\]: holds a lone"),
    ],
)
def test_bad_messages_are_named(messages: Any, param: str) -> None:
    with pytest.raises(RequestError, match=param):
        parse_messages(json.dumps(messages))


@pytest.mark.parametrize("text", ["", "{", "[NaN]", "[" * 100_000, '[{"role": "user",}]', "\x00"])
def test_malformed_json(text: str) -> None:
    with pytest.raises(RequestError, match=r"^messages: is (not valid JSON|nested too deeply)"):
        parse_messages(text)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_parts_that_are_no_text_are_not_supported_yet(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"messages\[0\]\.content\[0\]\.type: .*{kind}"):
        parse_messages(json.dumps([{"role": "user", "content": [{"type": kind, kind: {}}]}]))


_NAMES = st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.text(max_size=3)}, optional={"content": _VALUES, "tool_calls": _VALUES}
    ),
    max_size=3,
)


@given(messages=_VALUES | _MESSAGES)
def test_whatever_comes_is_parsed_or_refused(messages: Any) -> None:
    refused = None
    try:
        parsed = parse_messages(json.dumps(messages))
    except RequestError as error:
        refused = str(error)
    if refused is None:
        assert check_messages(parsed) == parsed
    else:
        assert refused.startswith("messages")


def test_values_that_json_cannot_express_are_refused() -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]: holds a value that JSON cannot"):
        check_messages([{**USER, "tool_calls": [call({"x": object()})]}])


def test_render(byte_level: Detokenizer) -> None:
    tokenizer = byte_level.tokenizer
    text = "<|user|>hi<|end|><|assistant|>"
    assert render_text(tokenizer, [USER]) == text
    assert render(tokenizer, [USER]) == tokenizer.encode(text, add_special_tokens=False)
    closed = ChatParameters(add_generation_prompt=False)
    assert render_text(tokenizer, [USER], closed) == "<|user|>hi<|end|>"
    assert render(tokenizer, [USER])[0] in tokenizer.special_ids


def test_the_template_writes_all_special_tokens(byte_fallback: Detokenizer) -> None:
    assert 1 not in render(byte_fallback.tokenizer, [USER])


def test_a_refusal_of_the_template_is_passed_on(byte_level: Detokenizer) -> None:
    with pytest.raises(RequestError, match=r"^messages: .*: No banned role, please$"):
        render(byte_level.tokenizer, [{"role": "banned", "content": "x"}])


def test_a_missing_template() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        render(Tokenizer(word_piece_tokenizer()), [USER])


def test_a_role_that_the_template_forbids() -> None:
    """As Gemma 2's does."""
    hf_tokenizer = byte_level_tokenizer()
    hf_tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ messages[0].content }}"
    )
    tokenizer = Tokenizer(hf_tokenizer)
    assert render(tokenizer, [USER])
    with pytest.raises(RequestError, match=r"^messages: .* refuses them: System role not supp"):
        render(tokenizer, [{"role": "system", "content": "Be kind."}, USER])


@pytest.mark.parametrize(
    ("template", "error", "text"),
    [
        ("{% if %}", CheckpointError, "chat template: line 1: "),
        ("{{ messages[0].content + 1 }}", RequestError, "cannot render them"),
        ("{{ messages[5].content.x }}", RequestError, "refuses them"),
        ({"tools": "x"}, RequestError, "no chat template"),
    ],
)
def test_templates_that_fail(template: Any, error: type[Exception], text: str) -> None:
    hf_tokenizer = byte_level_tokenizer()
    hf_tokenizer.chat_template = template
    with pytest.raises(error, match=text):
        render(Tokenizer(hf_tokenizer), [USER])


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", True),
        ("{{ messages[0].content }}", False),
        ("{{ raise_exception('roles must alternate') if messages[1].role == 'system' }}", False),
        (None, False),
    ],
)
def test_whether_system_messages_may_follow_others(template: str | None, takes: bool) -> None:
    hf_tokenizer = byte_level_tokenizer()
    hf_tokenizer.chat_template = template
    assert template_facts(Tokenizer(hf_tokenizer))["takes_late_system"] == takes
