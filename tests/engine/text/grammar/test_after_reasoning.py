"""Where a grammar begins, when reasoning may come first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.text.grammar.after_reasoning import after_reasoning
from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.vocabulary import Vocabulary
from engine.text.section_reader import place_after_prompt
from tests.engine.text.test_section_families import prompt_of
from tests.factories.grammars import follows, spec
from tests.factories.tagged import Form, format_of, tagged

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
DIGITS = spec(regex="[0-9]+")


@pytest.fixture(params=["special", "text"])
def form(request: pytest.FixtureRequest) -> Form:
    form: Form = request.param
    return form


def allowed(form: Form, opens: str, tags: tuple[str, ...] = TAGS) -> Iterator[tuple[str, bool]]:
    """Yield texts, and whether each is a whole output."""
    detokenizer = tagged(tags, form, opens=opens)
    tokenizer, section_format = detokenizer.tokenizer, format_of(detokenizer)
    assert tokenizer.eos_token_id is not None
    place = place_after_prompt(section_format, detokenizer, prompt_of(detokenizer, "Hi <think>"))
    compiler = GrammarCompiler(
        Vocabulary.of(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    )
    start = compiler.compile(after_reasoning(DIGITS, section_format, place)).result()
    for text in ("12", "<think>hm 3</think>12", "hm</think>12", "<think>12", "hm", "1</think>a"):
        yield text, follows(start, text, tokenizer)[1]
    compiler.close()


@pytest.mark.parametrize(
    ("opens", "whole"),
    [
        ("", ["12", "<think>hm 3</think>12"]),
        ("<think>", ["<think>hm 3</think>12", "hm</think>12"]),
        ("<think></think>", ["12"]),
    ],
)
def test_it_begins_after_what_the_prompt_or_the_model_opens(
    form: Form, opens: str, whole: list[str]
) -> None:
    assert [text for text, is_whole in allowed(form, opens) if is_whole] == whole


def test_without_reasoning_and_where_the_client_says_it_begins_as_asked() -> None:
    assert [text for text, ok in allowed("special", "", ("<tool_call>", "</tool_call>")) if ok] == [
        "12"
    ]
    section_format = format_of(tagged(TAGS, "special"))
    asked = spec(regex="a", begin_after="x")
    place = place_after_prompt(section_format, tagged(TAGS, "special"), [])
    assert after_reasoning(asked, section_format, place) is asked
