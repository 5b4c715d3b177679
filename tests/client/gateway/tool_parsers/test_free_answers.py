"""Answers that may call: what is enforced of the calls leaves the model free not to call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client.gateway.tool_parsers import ToolChoice
from tests.client.gateway.tool_parsers.random_model import Model, tools


@pytest.fixture(scope="module")
def gpt_oss() -> Iterator[Model]:
    model = Model("openai", "special", end="<|return|>")
    yield model
    model.compiler.close()


NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm, so.{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>Let me see.{NEXT}"
FINAL = "<|channel|>final<|message|>Hello"
HEAD = "<|channel|>commentary to=functions.f_1 <|constrain|>json<|message|>"
STRICT = ToolChoice.read(tools(strict=True))


@pytest.mark.parametrize("before", ["", THOUGHT, PREAMBLE, THOUGHT + PREAMBLE, PREAMBLE + THOUGHT])
@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_oss_thinks_and_answers_as_it_likes(
    before: str, parallel: bool, gpt_oss: Model
) -> None:
    choice = ToolChoice.read(tools(strict=True), "auto", parallel)
    called = f'{before}{HEAD}{{"x":true}}<|call|>'
    assert gpt_oss.allows(choice, f"{before}{FINAL}")
    assert gpt_oss.allows(choice, called)
    answer = gpt_oss.answer(choice, called)
    assert answer.calls == [("f_1", '{"x":true}')]
    assert answer.content == ("Let me see." if PREAMBLE in before else "")
    assert not gpt_oss.allows(choice, f'{before}{HEAD}{{"x":1')
    assert gpt_oss.allows(choice, f"{called}<|start|>assistant{HEAD}") == parallel


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        " to=functions.f_1<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=python<|message|>",
        f"<|channel|>analysis<|message|>Hm.{HEAD}",
        f"{FINAL}<|end|>",
        f"{FINAL}<|start|>assistant{HEAD}",
    ],
)
def test_gpt_oss_calls_by_no_other_header(text: str, gpt_oss: Model) -> None:
    assert not gpt_oss.allows(STRICT, text)


@pytest.fixture(scope="module")
def llama() -> Iterator[Model]:
    model = Model("llama3_json", "special")
    yield model
    model.compiler.close()


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f_1", "parameters": {"x": 1}}',
        '{"type": "function", "name": "f_1", "parameters": {"x": 1}}',
        '{"name":"f_1", "parameters": {"x": 1}}',
        '{\n  "name": "f_1", "parameters": {"x": 1}}',
        ' {"name": "f_1", "parameters": {"x": 1}}',
        '[ {"name": "f_1", "parameters": {"x": 1}}]',
        '<|python_tag|>{"name": "f_1", "parameters": {"x": 1}}',
        'Hi.<|python_tag|>{"name": "f_1", "parameters": {"x": 1}}',
    ],
)
def test_llama_calls_in_no_other_form(text: str, llama: Model) -> None:
    assert llama.answer(STRICT, text).calls == [("f_1", '{"x": 1}')]
    assert not llama.allows(STRICT, text)


@pytest.mark.parametrize(
    "text", ["Hi.", " \n\u00a0a", "[1] a {}", "[[{", 'Use {"name": "f_1", "parameters": {"x": 1}}']
)
def test_llama_answers_as_it_likes(text: str, llama: Model) -> None:
    assert llama.allows(STRICT, text)
    assert llama.answer(STRICT, text).calls == []
