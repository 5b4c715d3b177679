"""The second turn of a tool loop: answers that call tools, sent back to the chat template."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestError
from engine.text.chat_parameters import ChatParameters
from engine.text.chat_template import check_messages, render_text
from engine.text.plain_turns import plain_turns
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


def test_other_refusals_stay() -> None:
    tokenizer = tokenizer_with("{{ raise_exception('Never') }}")
    with pytest.raises(RequestError, match=r"refuses them: Never$"):
        render_text(tokenizer, after_a_call(content="a", reasoning_content="b"))


@pytest.mark.large
def test_real_templates_take_calls_back(tmp_path: Path) -> None:
    templates = sorted(download(tmp_path, "/models/templates/").glob("*.jinja"))
    families = ("Qwen", "unsloth-mistral", "meta-llama", "mistralai", "NousResearch", "openai")
    chosen = [path for path in templates if path.name.startswith(families)]
    assert len(chosen) > len(families)
    for path in chosen:
        tokenizer = tokenizer_with(path.read_text(encoding="utf-8"))
        for said in ({}, {"reasoning_content": "b"}, {"reasoning_content": "b", "content": "a"}):
            prompt = render_text(tokenizer, after_a_call(**said), ChatParameters((TOOL,)))
            assert "3" in prompt
    two = [called("f", id="abcdefgh1"), called("f", id="abcdefgh2")]
    for path in (path for path in chosen if path.name.startswith("meta-llama")):
        tokenizer = tokenizer_with(path.read_text(encoding="utf-8"))
        prompt = render_text(tokenizer, after_a_call(tool_calls=two), ChatParameters((TOOL,)))
        assert prompt.count('{"name": "f"') == 2
