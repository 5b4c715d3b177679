"""The second turn of a tool loop: answers that call tools, sent back to the chat template."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.text.chat_parameters import ChatParameters
from engine.text.chat_template import check_messages, render_text
from engine.text.plain_turns import alternating_turns, plain_turns
from engine.text.tokenizer import Tokenizer
from tests.factories.llama_cpp import download
from tests.factories.tokenizers import byte_level_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
ID = "abcdefghi"  # as Mistral's templates take it
CALL = {"id": ID, "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
ONE_OF_TWO = (  # as gpt-oss's template
    "{% for m in messages %}"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('Not both') }}{% endif %}"
    "{{ '<' + m.role + '>' + (m.content or m.thinking) }}{% endfor %}"
)


def after_a_call(**said: Any) -> list[dict[str, Any]]:
    """Return the conversation of a client that has run what the model asked for."""
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL], **said}
    result = {"role": "tool", "content": "3", "tool_call_id": ID}
    return check_messages([{"role": "user", "content": "hi"}, answer, result])


def tokenizer_with(template: str) -> Tokenizer:
    hf_tokenizer = byte_level_tokenizer()
    hf_tokenizer.chat_template = template
    return Tokenizer(hf_tokenizer)


@pytest.mark.parametrize(
    "expression",
    ["m.content.split('</think>')[-1]", "m['content'] + ''", "m.content if m.content is string"],
)
def test_templates_may_read_the_content_of_a_call(expression: str) -> None:
    tokenizer = tokenizer_with(f"{{% for m in messages %}}{{{{ {expression} }}}}{{% endfor %}}")
    assert render_text(tokenizer, after_a_call()) == "hi3"


def test_reasoning_and_content_are_joined_where_a_template_takes_one() -> None:
    said = after_a_call(content="Let me see.", reasoning_content="Why?")
    prompt = render_text(tokenizer_with(ONE_OF_TWO), said)
    assert prompt == "<user>hi<assistant>Why?\n\nLet me see.<tool>3"
    apart = "{% for m in messages %}({{ m.content }},{{ m.reasoning_content }}){% endfor %}"
    assert render_text(tokenizer_with(apart), said) == "(hi,)(Let me see.,Why?)(3,)"


ONE_CALL = (  # as Llama 3.1's template
    "{% for m in messages %}"
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('One') }}{% endif %}"
    "{{ '<' + m.role + '>' + m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{% endfor %}{% endfor %}"
)


def called(name: str, **other: Any) -> dict[str, Any]:
    return {**other, "type": "function", "function": {"name": name, "arguments": "{}"}}


@pytest.mark.parametrize(
    ("ids", "result_ids", "rendered"),
    [
        (("1", "2"), ("1", "2"), "So.f<tool>r1<assistant>g<tool>r2"),
        (("1", "2"), ("2", "1"), "So.f<tool>r1<assistant>g<tool>r2"),
        (("1", "2"), ("2",), "So.f<assistant>g<tool>r2"),
        (("1", "2"), (None, None), "So.f<tool>rNone<assistant>g<tool>rNone"),
        (("1", "2"), ("x", None, None), "So.f<tool>rNone<assistant>g<tool>rNone<tool>rx"),
        (("1", "2"), (), "So.f<assistant>g"),
        (("1", "2"), ("1", "x", "2"), "So.f<tool>r1<assistant>g<tool>r2<tool>rx"),
    ],
)
def test_calls_follow_one_another_where_a_template_takes_one(
    ids: tuple[str, ...], result_ids: tuple[str | None, ...], rendered: str
) -> None:
    calls = [called(name, id=call_id) for name, call_id in zip("fg", ids, strict=True)]
    user = {"role": "user", "content": "hi"}
    said = {"role": "assistant", "content": "So.", "tool_calls": calls}
    results = [{"role": "tool", "content": f"r{i}", "tool_call_id": i} for i in result_ids]
    messages = check_messages([user, said, *results, user])
    prompt = render_text(tokenizer_with(ONE_CALL), messages)
    assert prompt == f"<user>hi<assistant>{rendered}<user>hi"
    plain = plain_turns(messages)
    assert plain_turns(plain) == plain


# As those of Mistral Small 3.2 and Nemo; Ministral 3's takes any id, and no empty answer.
STRICT_TURNS = (
    "{% set counted = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (counted.n % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{% set counted.n = counted.n + 1 %}{% endif %}{% endfor %}"
)
SHOWN_TURNS = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('empty') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}(CHECK{{ c.function.name }}){% endfor %}"
    "{% if m.role == 'tool' %}RESULT{% endif %}{% endfor %}"
)
NINE = "{{ raise_exception('nine') if not ID is defined or ID | length != 9 }}{{ ID }} "
MISTRAL = STRICT_TURNS + SHOWN_TURNS.replace("CHECK", NINE.replace("ID", "c.id")).replace(
    "RESULT", "(" + NINE.replace("ID", "m.tool_call_id") + ")"
)
MINISTRAL = STRICT_TURNS + SHOWN_TURNS.replace("CHECK", "").replace("RESULT", "")


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(*ids: str | None) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": "f", "arguments": "{}"}} for _ in ids]
    named = [{**call, "id": i} if i else call for call, i in zip(made, ids, strict=True)]
    return said("assistant", None, tool_calls=named)


def result(content: str, call_id: str | None) -> dict[str, Any]:
    return said("tool", content, tool_call_id=call_id)


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        (
            [said("user", "a"), calls("toolu_1"), result("3", "toolu_1"), said("user", "b")],
            "[user]a[assistant](f)[tool]3[assistant]Understood.[user]b",
        ),
        (
            [said("user", "a"), calls("x", "y"), result("1", "y"), result("2", "x")],
            "[user]a[assistant](f)(f)[tool]1[tool]2",
        ),
        (
            [said("user", "a"), calls("x"), said("user", "b"), said("user", "c")],
            "[user]a[assistant](f)[assistant]Understood.[user]b\n\nc",
        ),
        (
            [said("system", "s"), said("system", "t"), said("user", "a"), said("user", "b")],
            "[system]s\n\nt[user]a\n\nb",
        ),
        (
            [said("user", "a"), said("assistant", "b"), calls("x"), result("3", "x")],
            "[user]a[assistant]b[assistant](f)[tool]3",
        ),
        (
            [
                said("user", "a"),
                *(said("assistant", "b"), calls("x"), result("3", "x"), said("assistant", "c")),
            ],
            "[user]a[assistant]b(f)[tool]3[assistant]c",
        ),
        (
            [said("user", "a"), said("assistant", "b"), said("assistant", "c"), said("user", "d")],
            "[user]a[assistant]b\n\nc[user]d",
        ),
    ],
)
def test_turns_alternate_where_a_template_wants_it(
    messages: list[dict[str, Any]], prompt: str
) -> None:
    checked = check_messages(messages)
    assert render_text(tokenizer_with(MINISTRAL), checked) == prompt
    assert re.sub(r"\(\w{9} \)|\w{9} ", "", render_text(tokenizer_with(MISTRAL), checked)) == prompt


@pytest.mark.parametrize(
    ("ids", "result_ids", "answers"),
    [
        (["call_NdqJ8xEG9D8OKfDf"], ["call_NdqJ8xEG9D8OKfDf"], [0]),
        (["toolu_01A09q90qw90lq917835lq9"], ["toolu_01A09q90qw90lq917835lq9"], [0]),
        (["a", "b"], ["b", "a"], [1, 0]),
        ([None, None], [None, None], [0, 1]),
        (["a", "b"], [None, "a"], [1, 0]),
    ],
)
def test_ids_of_calls_are_nine_letters_where_a_template_wants_it(
    ids: list[str | None], result_ids: list[str | None], answers: list[int]
) -> None:
    turn = [said("user", "a"), calls(*ids), *(result("3", i) for i in result_ids)]
    tokenizer = tokenizer_with(MISTRAL)
    prompt = render_text(tokenizer, check_messages(turn))
    found = re.findall(r"\((\w{9}) ", prompt)
    called, answered = found[: len(ids)], found[len(ids) :]
    assert len(set(called)) == len(ids)
    assert answered == [called[i] for i in answers]
    longer = [*turn, said("assistant", "b"), said("user", "c"), calls("z"), result("4", "z")]
    assert render_text(tokenizer, check_messages(longer)).startswith(prompt)


def test_ids_that_a_template_takes_stay() -> None:
    turn = [said("user", "a"), calls(ID), result("3", ID), said("user", "b")]
    prompt = render_text(tokenizer_with(MISTRAL), check_messages(turn))
    assert re.findall(r"\((\w{9}) ", prompt) == [ID, ID]


_TURNS = st.lists(
    st.one_of(
        st.just([said("user", "u")]),
        st.just([said("assistant", "a")]),
        st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3, unique=True).map(
            lambda ids: [calls(*ids), *(result("r", i) for i in ids)]
        ),
    )
)


@given(turns=_TURNS)
def test_any_conversation_that_a_user_begins_is_taken(turns: list[list[dict[str, Any]]]) -> None:
    messages = check_messages([said("user", "u"), *(each for turn in turns for each in turn)])
    made = alternating_turns(messages)
    assert alternating_turns(made) == made
    prompt = render_text(_MISTRAL, messages)
    words = [word for word in re.findall(r"\](\w+)", prompt) if word != "Understood"]
    asked = [m["content"] for m in messages if m["content"]]
    assert sum(map(len, words)) == len(asked) - prompt.count("\n\n")


_MISTRAL = tokenizer_with(MISTRAL)


def test_other_refusals_stay() -> None:
    tokenizer = tokenizer_with("{{ raise_exception('Never') }}")
    with pytest.raises(RequestError, match=r"refuses them: Never$"):
        render_text(tokenizer, after_a_call(content="a", reasoning_content="b"))


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Published chat templates of models that call tools, by the names of their files."""
    folder = download(tmp_path_factory.mktemp("templates"), "/models/templates/")
    families = (
        *("Qwen", "unsloth-mistral", "meta-llama", "mistral", "Mistral", "NousResearch"),
        *("openai", "ByteDance", "CohereForAI"),
    )
    chosen = [path for path in folder.glob("*.jinja") if path.name.startswith(families)]
    made = {path.name: tokenizer_with(path.read_text(encoding="utf-8")) for path in chosen}
    assert all(any(name.startswith(family) for name in made) for family in families)
    return made


@pytest.mark.large
def test_real_templates_take_calls_back(templates: dict[str, Tokenizer]) -> None:
    for tokenizer in templates.values():
        for said in ({}, {"reasoning_content": "b"}, {"reasoning_content": "b", "content": "a"}):
            prompt = render_text(tokenizer, after_a_call(**said), ChatParameters((TOOL,)))
            assert "3" in prompt
    two = [called("f", id="abcdefgh1"), called("f", id="abcdefgh2")]
    for name in (name for name in templates if name.startswith("meta-llama")):
        prompt = render_text(templates[name], after_a_call(tool_calls=two), ChatParameters((TOOL,)))
        assert prompt.count('{"name": "f"') == 2


@pytest.mark.large
@pytest.mark.parametrize("call_id", ["call_NdqJ8xEG9D8OKfDf", "toolu_01A09q90qw90lq917835lq9"])
def test_real_templates_take_what_agents_send(
    call_id: str, templates: dict[str, Tokenizer]
) -> None:
    """A system message, tools with little said, and words of the user after each result."""
    bare = {"type": "function", "function": {"name": "f"}}
    turn = [calls(call_id), result("Three.", call_id), said("user", "Go on.")]
    talk = [said("system", "Be kind."), said("user", "What is it?"), *turn]
    for name, tokenizer in templates.items():
        for messages in (talk, talk[:-1], [*talk, said("assistant", "A cat."), talk[1], *turn]):
            prompt = render_text(tokenizer, check_messages(messages), ChatParameters((bare,)))
            lost = [m["content"] for m in messages if m["content"] and m["content"] not in prompt]
            assert not lost, name


BROKEN = [
    '{"city": "Zü',  # cut off
    '{"city": ',
    '{"a": [1, {"b": 2',
    '{"code": "if x:\n\tpass"}',
    '{"path": "C:\\dir\\new"}',
    '{"city": "\\ud83d"}',
    '{"n": NaN}',
    "{'a': 1}",
    "[1]",
    "print(1)",
    '{"a": 1}}',
    "[" * 100_000,
]
AS_JSON = [
    "{{ c.function.arguments | tojson }}",
    "{{ c.function | tojson }}",
    "{{ c.function.arguments | tojson(indent=4) }}",
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
]
ONE_BY_ONE = (  # as Qwen3-Coder's
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>"
    "{{ v if v is string else v | tojson }}</parameter>{% endfor %}"
)


def prompt_with(written: str, *arguments: Any) -> str:
    """Return the prompt of a template that writes calls so."""
    loops = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
    tokenizer = tokenizer_with(f"{loops}{written}{{% endfor %}}{{% endfor %}}")
    calls = [
        {"id": ID, "type": "function", "function": {"name": "f", "arguments": each}}
        for each in arguments
    ]
    return render_text(tokenizer, after_a_call(tool_calls=calls))


@pytest.mark.parametrize("written", AS_JSON)
@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_broken_arguments_are_in_the_prompt_as_they_were_written(text: str, written: str) -> None:
    whole = {"x": 1}
    prompt = prompt_with(written, whole, text, text)
    expected = prompt_with(written, whole, {"mark": ""}, {"mark": ""})
    expected = re.sub(r'\{\s*"mark": ""\s*\}', lambda _: text, expected)
    assert prompt == expected


@given(texts=st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=3))
def test_any_text_for_arguments_is_rendered(texts: list[str]) -> None:
    prompt = prompt_with(f"({AS_JSON[0]})", *texts)
    expected = ""
    for text in texts:
        try:
            parsed = json.loads(text or "{}", parse_constant=lambda _: 1 / 0)
        except (ValueError, ArithmeticError):
            parsed = None
        plain = json.dumps(parsed, ensure_ascii=False) if isinstance(parsed, dict) else text
        expected += f"({plain if text.strip() else '{}'})"
    assert expected in prompt
    assert prompt_with(ONE_BY_ONE, *texts)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ('{"city": "Zü', "<parameter=city>Zü</parameter>"),
        ('{"days": 3, "city": ', "<parameter=days>3</parameter>"),
        ('{"code": "if x:\n\tpass"}', "<parameter=code>if x:\n\tpass</parameter>"),
        ('{"path": "C:\\dir\\"x\\""}', '<parameter=path>C:\\dir"x"</parameter>'),
        ("print(1)", "<parameter=INVALID_JSON>print(1)</parameter>"),
        ("[1]", "<parameter=INVALID_JSON>[1]</parameter>"),
    ],
)
def test_templates_of_arguments_one_by_one_get_what_is_readable(text: str, parameters: str) -> None:
    assert prompt_with(ONE_BY_ONE, text) == f"<user>hi<assistant>{parameters}<tool>3"


def test_templates_without_calls_take_broken_ones() -> None:
    assert prompt_with("{{ c.function.name }}", '{"a') == "<user>hi<assistant>f<tool>3"
