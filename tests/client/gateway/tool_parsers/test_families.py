"""What each family writes, in answers of our own, read whole; cuts are in test_cuts.py."""

from __future__ import annotations

import json

import pytest

from client.gateway.tool_parsers import TOOL_PARSERS
from client.protocol import Section
from tests.client.gateway.tool_parsers.answers import Answer, content, read, tool_call


def called(name: str, *sections: Section, reason: str = "stop") -> Answer:
    return read(TOOL_PARSERS[name], [list(sections)], reason)


def test_hermes() -> None:
    answer = called(
        "hermes",
        Section("reasoning", 1, "\nhm \n", "<think>"),
        content("\n\nLet me see.\n", 2, "</think>"),
        tool_call('\n{"name": "get_weather", "arguments": {"city": "Zürich}"}}\n', 3),
        content("\n", 4, "</tool_call>"),
        tool_call('{"arguments": "{\\"city\\": \\"\\u00e9\\"}", "name": "get_weather"}', 5),
        content("", 6, "</tool_call>"),
        tool_call('{"name": "now"}', 7),
        content("\n", 8, "</tool_call>"),
    )
    assert answer == Answer(
        "Let me see.",
        "hm",
        [
            ("get_weather", '{"city": "Zürich}"}'),
            ("get_weather", '{"city": "é"}'),
            ("now", "{}"),
        ],
        "tool_calls",
    )


@pytest.mark.parametrize("name", ["ernie45", "granite4"])
def test_families_that_write_as_hermes(name: str) -> None:
    call = tool_call('\n{"name": "now", "arguments": {"x": 1}}\n')
    assert called(name, call).calls == [("now", '{"x": 1}')]


def test_tags_around_something_else_are_content() -> None:
    answer = called(
        "hermes",
        content("a "),
        tool_call('{"nam": 1}', 1),
        content(" b", 2, "</tool_call>"),
    )
    assert answer == Answer('a <tool_call>{"nam": 1}</tool_call> b', "", [], "stop")


def test_a_function_that_there_is_not_is_for_the_client_to_refuse() -> None:
    assert called("hermes", tool_call('{"name": "fly", "arguments": {}}')).calls == [("fly", "{}")]


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_call_that_was_cut_off_is_none_of_tool_calls(reason: str) -> None:
    text = '{"name": "get_weather", "arguments": {"city": "Zü'
    answer = called("hermes", tool_call(text), reason=reason)
    assert answer == Answer("", "", [("get_weather", '{"city": "Zü')], reason)
    whole = called("hermes", tool_call(text + '"}}'), reason="length")
    assert (whole.calls[0][1], whole.finish_reason) == ('{"city": "Zü"}', "length")
    nothing = called("hermes", content("Hi. "), tool_call('{"na', 1), reason=reason)
    assert nothing == Answer('Hi. <tool_call>{"na', "", [], reason)


def test_qwen3_coder_has_the_types_of_the_schema() -> None:
    text = (
        "\n<function=get_weather>\n<parameter=city>\n1 < 2\n</para\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=at>\n{'x': 1}\n</parameter>\n"
        '<parameter=tags>\n["a"]\n</parameter>\n<parameter=limit>null</parameter>\n'
        "<parameter=dry>True</parameter><parameter=note>12</parameter>"
        "<parameter=units>C</parameter><parameter=days>4</parameter>"
        '<parameter=new>"q"</parameter>\n</function>\n'
    )
    [(name, arguments)] = called("qwen3_coder", tool_call(text)).calls
    assert name == "get_weather"
    assert json.loads(arguments) == {
        "city": "1 < 2\n</para",
        "days": 3,
        "at": {"x": 1},
        "tags": ["a"],
        "limit": None,
        "dry": True,
        "note": "12",
        "units": "C",
        "new": '"q"',
    }
    two = called("qwen3_coder", tool_call("<function=now>\n</function><function=now></function>"))
    assert two.calls == [("now", "{}")] * 2
    assert called("qwen3_coder", tool_call("a")).content == "<tool_call>a"


def test_qwen3_coder_without_what_opens_a_call() -> None:
    call = "now>\n<parameter=x>\n1\n</parameter>\n</function>\n<function=now></function>\n"
    answer = called(
        "qwen3_coder",
        content("Hm.\n"),
        tool_call(call, 1, "<function="),
        content("\n", 2, "</tool_call>"),
    )
    assert answer == Answer("Hm.", "", [("now", '{"x": "1"}'), ("now", "{}")], "tool_calls")
    for text in ("fly> is", "now"):  # no function, or not yet
        answer = called("qwen3_coder", content("A "), tool_call(text, 1, "<function="))
        assert answer == Answer(f"A <function={text}", "", [], "stop")


@pytest.mark.parametrize(
    "value",
    [
        "a\n<parameter=x>b",  # no parameter of the function
        "a\n<parameter=city>b",  # given already: this one
        "a <parameter=days>",  # not at the beginning of a line
        "a\n</function>\nb",
        "a</function>",
        "a</parameter>b",
        "a\n</parameter>\n\nb",
        "</parameter>",
        "a</parameter>\n</tool_call>",
    ],
)
def test_what_looks_like_the_end_of_a_text_is_in_it(value: str) -> None:
    text = f"<function=get_weather><parameter=city>{value}</parameter></function>"
    [(_, arguments)] = called("qwen3_coder", tool_call(text)).calls
    assert json.loads(arguments) == {"city": value}


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("rest", ["", "\n", "\n</func"])
def test_qwen3_coder_cut_off_after_a_value_has_it_whole(rest: str, reason: str) -> None:
    text = f"<function=get_weather>\n<parameter=days>\n3\n</parameter>{rest}"
    answer = called("qwen3_coder", tool_call(text), reason=reason)
    assert answer == Answer("", "", [("get_weather", '{"days": 3')], reason)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tags", "['a', True, None, (1,)]", ["a", True, None, [1]]),
        ("tags", "('a', 'b')", ["a", "b"]),
        ("tags", '["a", true]', ["a", True]),
        ("at", "{'x': {'y': None}}", {"x": {"y": None}}),
        ("limit", "None", None),
        ("dry", "True", True),
        # What is no value of the type is text.
        ("tags", "{'x': 1}", "{'x': 1}"),
        ("at", "{1: 2}", "{1: 2}"),
        ("at", "dict(x=1)", "dict(x=1)"),
        ("tags", "[__import__('os')]", "[__import__('os')]"),
        ("city", "['a']", "['a']"),
    ],
)
def test_qwen3_coder_may_write_values_as_python_does(name: str, text: str, value: object) -> None:
    call = f"<function=get_weather>\n<parameter={name}>\n{text}\n</parameter>\n</function>"
    [(_, arguments)] = called("qwen3_coder", tool_call(call)).calls
    assert json.loads(arguments) == {name: value}


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_llama3_json(tag: str) -> None:
    def section(text: str) -> Section:
        return tool_call(text, 1, tag) if tag else content(text)

    call = '{"type": "function", "name": "now", "parameters": {"city": "a"}}'
    for text in (call, f"\n{call}; {call}", f"[{call}, {call}]"):
        answer = called("llama3_json", section(text))
        assert answer.calls == [("now", '{"city": "a"}')] * text.count("now")
        assert (answer.content, answer.finish_reason) == ("", "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        "Hello {there}",
        " ",
        "{",
        '{"name": "Bob", "parameters": {}}',
        '{"name": "now", "age": 3}',
        '{"name": 3}',
        '{"name": "now", "parameters": [1]}',
        "[1, 2]",
        "[now",
        "[bob(a=1)]",
        "[now(1)]",
        "[now(a=f(1))]"[:5],
        "{'name': 'now'}",
    ],
)
@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_an_answer_that_is_no_call_is_content_to_the_last_character(name: str, text: str) -> None:
    assert called(name, content(text)) == Answer(text, "", [], "stop")


def test_pythonic() -> None:
    text = (
        "[get_weather(city='a\"\\n\\'b', days=-3, tags=[1.5, (True, None)], at={'x': \"]\"}, "
        "dry=true, note='''q'''), now( )]"
    )
    answer = called("pythonic", content(text))
    [(name, arguments), now] = answer.calls
    assert (name, now, answer.content) == ("get_weather", ("now", "{}"), "")
    assert answer.finish_reason == "tool_calls"
    assert json.loads(arguments) == {
        "city": "a\"\n'b",
        "days": -3,
        "tags": [1.5, [True, None]],
        "at": {"x": "]"},
        "dry": True,
        "note": "q",
    }
    for name, tag in (("llama4_pythonic", "<|python_start|>"), ("lfm2", "<|tool_call_start|>")):
        tagged = called(name, tool_call('[fly(x="1")]', 1, tag), content("Up.", 2, "</"))
        assert tagged == Answer("Up.", "", [("fly", '{"x": "1"}')], "tool_calls")


@pytest.mark.parametrize(
    "value", ["__import__('os')", "a + b", "1e999", "b''", "{1: 2}", "f'{x}'", "[" * 300, "1j"]
)
def test_expressions_are_never_evaluated(value: str) -> None:
    text = f"[now(x={value}, y=1)]"
    assert called("pythonic", content(text)) == Answer(text, "", [], "stop")
    answer = called("pythonic", content(f"[now(y=1, x={value})]"))
    assert answer.calls == [("now", '{"y": 1')]  # what has been sent stays
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("rest", ["now(x=1+1)]", "now(1)]", "now(y x=1)]"])
def test_what_follows_calls_and_is_none_is_content(rest: str) -> None:
    answer = called("pythonic", content(f"[now(), {rest}"))
    assert answer == Answer(rest, "", [("now", "{}")], "tool_calls")


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_first_argument_that_was_cut_off_is_content(reason: str) -> None:
    for text in ("[now(", "[now(x", "[now(x=", '[now(x="a'):
        assert called("pythonic", content(text), reason=reason) == Answer(text, "", [], reason)


@pytest.mark.parametrize(
    "sections",
    [
        ['[{"name": "now", "arguments": {}, "id": "abcdefgh1"}, {"name": "now"}]'],
        ["now[ARGS]{}", "now[CALL_ID]abcdefgh1[ARGS]{}"],
        ["now{}", "now {}"],
    ],
)
def test_mistral_in_all_its_forms(sections: list[str]) -> None:
    parts = [tool_call(text, i + 1, "[TOOL_CALLS]") for i, text in enumerate(sections)]
    assert called("mistral", *parts).calls == [("now", "{}")] * 2
    assert len(TOOL_PARSERS["mistral"].new_id()) == 9


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        "<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>",
    ],
)
def test_gpt_oss_names_the_function_in_the_header(header: str) -> None:
    assert called("openai", tool_call(' {"x": "}"} ', 1, header)).calls == [("now", '{"x": "}"}')]
    assert called("openai", tool_call("", 1, header)).calls == [("now", "{}")]
    assert called("openai", tool_call('{"x": ', 1, header)).finish_reason == "stop"
    own = header.replace("functions.now", "python")
    assert called("openai", tool_call("print(1)", 1, own)).calls == [("python", "print(1)")]


def test_without_tools_all_but_reasoning_is_content() -> None:
    parts = [
        Section("reasoning", 0, "hm"),
        content("\nLook: ", 1, "</think>"),
        tool_call("{}", 2),
        content(" is a tag.\n", 3, "</tool_call>"),
    ]
    answer = read(None, [parts])
    assert answer == Answer("Look: <tool_call>{}</tool_call> is a tag.\n", "hm", [], "stop")
