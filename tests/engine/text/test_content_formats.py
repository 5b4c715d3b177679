"""What messages say reaches the prompt, in the form that the chat template takes, or is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.text.chat_parameters import ChatParameters
from engine.text.chat_template import check_messages, render_text
from engine.text.tokenizer import Tokenizer
from tests.factories.tokenizers import byte_level_tokenizer

# As LLaVA 1.5's: contents are lists of parts, of which it shows the texts.
PARTS = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role.upper() + ': ' }}{% endif %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# As Mistral Small 3.1's: what the system says is a list, what others say may be either.
SYSTEM_IN_PARTS = (
    "{% if messages[0].role == 'system' %}[S]{{ messages[0].content[0].text }}[/S]"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
# As Qwen-VL's: a list may hold images, a string is as good.
EITHER = "{% for m in messages %}[{{ m.role }}]" + SYSTEM_IN_PARTS.split("[{{ m.role }}]")[1]
STRING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ADDED = "{% for m in messages %}[{{ m.role }}]{{ m.content + '' }}{% endfor %}"
NEEDS_TOOLS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + PARTS

USER = {"role": "user", "content": "What is it?"}
CALL = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "Three."}
SYSTEM = {"role": "system", "content": "Be kind."}
ANSWER = {"role": "assistant", "content": "A cat."}


def with_template(template: Any) -> Tokenizer:
    hf_tokenizer = byte_level_tokenizer()
    hf_tokenizer.chat_template = template
    return Tokenizer(hf_tokenizer)


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@pytest.mark.parametrize(
    ("template", "forms"),
    [
        (PARTS, ["openai"] * 4),
        (NEEDS_TOOLS, ["openai"] * 4),
        (SYSTEM_IN_PARTS, ["string", "openai", "string", "string"]),
        (EITHER, ["string"] * 4),
        (STRING, ["string"] * 4),
        (ADDED, ["string"] * 4),
        ({"default": PARTS}, ["openai"] * 4),
    ],
)
def test_content_formats_are_those_that_a_template_shows(template: Any, forms: list[str]) -> None:
    found = with_template(template).content_formats
    assert found == dict(zip(("user", "system", "assistant", "tool"), forms, strict=True))


@pytest.mark.parametrize("template", [PARTS, SYSTEM_IN_PARTS, EITHER, STRING, ADDED])
@pytest.mark.parametrize("given", [dict, as_parts])
def test_both_formats_of_content_reach_the_prompt(template: str, given: Any) -> None:
    tokenizer = with_template(template)
    said = (SYSTEM, USER, ANSWER, USER)
    prompt = render_text(tokenizer, check_messages([given(message) for message in said]))
    texts = [prompt.index(message["content"]) for message in said[:3]]
    assert texts == sorted(texts)
    assert prompt.count("What is it?") == 2


def test_prompt_of_parts_is_that_of_the_template() -> None:
    tokenizer = with_template(PARTS)
    assert render_text(tokenizer, [USER]) == "USER: What is it? ASSISTANT:"
    open_answer = ChatParameters(add_generation_prompt=False, continue_final_message=True)
    prompt = render_text(tokenizer, [USER, ANSWER], open_answer)
    assert prompt == "USER: What is it? ASSISTANT: A cat."


def test_another_template_has_formats_of_its_own() -> None:
    tokenizer = with_template(PARTS)
    assert tokenizer.content_formats["user"] == "openai"
    assert tokenizer.with_chat_template(ADDED).content_formats["user"] == "string"


# As those of Phi-3.5, gpt-oss and DeepSeek's R1.
WITHOUT_TOOLS = "{% for m in messages if m.role in ['system', 'user'] %}{{ m.content }}{% endfor %}"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.role }} {{ m.content }}\n"
    "{% endif %}{% endfor %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(said='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.said = m.content %}{% endfor %}{{ ns.said }}"
    "{% for m in messages if m.role != 'system' %}|{{ m.content }}{% endfor %}"
)
# As Mistral Nemo's.
SYSTEM_IN_LAST_USER = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "index"),
    [
        (WITHOUT_TOOLS, [USER, CALL, RESULT], 2),
        (WITHOUT_TOOLS, [USER, {"role": "critic", "content": "So?"}], 1),
        (ONE_SYSTEM, [USER, SYSTEM], 1),
        (ONE_SYSTEM, [SYSTEM, USER, ANSWER, SYSTEM, USER], 3),
        ("{{ messages[0].content }}", [USER, ANSWER], 1),
        ("{{ messages[0].role }}", [USER], 0),
        ({"default": PARTS.replace("text'", "words'")}, [USER], 0),
    ],
)
def test_message_that_a_template_leaves_out_is_refused(
    template: Any, messages: list[Any], index: int
) -> None:
    refusal = (
        rf"^messages\[{index}\]\.content: the model's chat template leaves out the content of role"
    )
    with pytest.raises(RequestError, match=refusal):
        render_text(with_template(template), check_messages(messages))


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (ONE_SYSTEM, [SYSTEM, SYSTEM, USER], "system Be kind.\n\nBe kind.\nuser What is it?\n"),
        (LAST_SYSTEM, [SYSTEM, SYSTEM, USER], "Be kind.\n\nBe kind.|What is it?"),
        (SYSTEM_IN_LAST_USER, [SYSTEM, USER], "[user]Be kind.\n\nWhat is it?"),
        (
            SYSTEM_IN_LAST_USER,
            [SYSTEM, USER, CALL, RESULT],
            "[user]Be kind.\n\nWhat is it?[assistant]Let me see.[tool]Three.",
        ),
        (
            SYSTEM_IN_LAST_USER,
            [SYSTEM, USER, ANSWER, USER, ANSWER],
            "[user]What is it?[assistant]A cat.[user]Be kind.\n\nWhat is it?[assistant]A cat.",
        ),
    ],
)
def test_system_message_that_a_template_leaves_out_is_put_where_it_shows(
    template: str, messages: list[Any], prompt: str
) -> None:
    assert render_text(with_template(template), check_messages(messages)) == prompt


REWRITES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | replace('/no_think', '') }}"
    "{% elif m.role == 'user' %}{{ m.content | trim }}"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content.split('</think>')[-1].strip() }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("text", ["", " \n", "/no_think", ' {"a": "<b>"}\n', "<think>b</think>"])
def test_text_that_a_template_rewrites_is_no_loss(text: str) -> None:
    messages = [
        {**SYSTEM, "content": text},
        {**USER, "content": f" {text} "},
        {**CALL, "content": text},
        {**RESULT, "content": text},
        {**ANSWER, "content": text},
    ]
    shown = [text.replace("/no_think", ""), text.strip(), text.split("</think>")[-1].strip()]
    expected = f"{shown[0]}{shown[1]}{shown[2]}{json.dumps(text)}{shown[2]}"
    assert render_text(with_template(REWRITES), check_messages(messages)) == expected


def test_text_beside_a_call_may_be_left_out() -> None:
    """Many templates drop it: Llama 3's, Mistral's and Cohere's."""
    template = "{% for m in messages if not m.tool_calls %}{{ m.content }}{% endfor %}"
    assert render_text(with_template(template), check_messages([USER, CALL, RESULT]))


_ROLES = st.sampled_from(["system", "user", "assistant", "tool", "critic"])
_MESSAGES = st.lists(st.fixed_dictionaries({"role": _ROLES, "content": st.text()}), min_size=1)


@given(messages=_MESSAGES)
def test_text_of_any_message_is_in_the_prompt_of_a_template_that_shows_all(
    messages: list[dict[str, Any]],
) -> None:
    for template in _SHOW_ALL:
        prompt = render_text(template, messages)
        assert [message["content"].strip() in prompt for message in messages].count(False) == 0


@given(messages=_MESSAGES)
def test_text_of_a_template_that_drops_a_role_is_never_lost_silently(
    messages: list[dict[str, Any]],
) -> None:
    dropped = [m for m in messages if m["role"] == "critic" and m["content"].strip()]
    refused = False
    try:
        render_text(_DROPS_CRITICS, messages)
    except RequestError as error:
        refused = "role 'critic'" in str(error)
    assert refused == bool(dropped)


_SHOW_ALL = [with_template(template) for template in (PARTS, EITHER, STRING)]
_DROPS_CRITICS = with_template(
    "{% for m in messages if m.role != 'critic' %}{{ m.content }}{% endfor %}"
)
