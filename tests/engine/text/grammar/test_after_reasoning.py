"""Where a grammar begins, when reasoning may come first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.text.grammar.after_reasoning import after_reasoning
from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.vocabulary import Vocabulary
from engine.text.output_parsing.chunk_parser import state_after_prompt
from engine.text.output_parsing.parser import ParserState
from tests.engine.text.output_parsing.test_families import HARMONY, prompt_of
from tests.factories.grammars import follows, spec
from tests.factories.tagged import Form, format_of, tagged

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEXTS = ("12", "<think>hm 3</think>12", "hm</think>12", "<think>12", "hm", "1</think>a")
DIGITS = spec(regex="[0-9]+")


@pytest.fixture(params=["special", "text"])
def form(request: pytest.FixtureRequest) -> Form:
    form: Form = request.param
    return form


def allowed(
    form: Form,
    opens: str,
    tags: tuple[str, ...] = TAGS,
    texts: tuple[str, ...] = TEXTS,
    end: str = "<|end|>",
) -> Iterator[tuple[str, bool]]:
    """Yield texts, and whether each is a whole output."""
    detokenizer = tagged(tags, form, opens=opens)
    tokenizer, parser_spec = detokenizer.tokenizer, format_of(detokenizer)
    parser_state = state_after_prompt(
        parser_spec, detokenizer, prompt_of(detokenizer, "Hi <think>")
    )
    ends = [tokenizer.added_token_ids[end]]
    compiler = GrammarCompiler(Vocabulary.of(tokenizer, tokenizer.vocab_size, ends))
    start = compiler.compile(after_reasoning(DIGITS, parser_spec, parser_state)).result()
    for text in texts:
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


def test_gpt_oss_opens_its_answer_by_a_header() -> None:
    thought = "<|channel|>analysis<|message|>hm 3<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>12"
    texts = (final, thought + final, "12", thought + "12", thought + thought + final, thought)
    found = allowed("special", "<|start|>assistant", HARMONY, texts, end="<|call|>")
    assert [text for text, is_whole in found if is_whole] == [final, thought + final]
    parser_spec = format_of(tagged(HARMONY, "special", opens="<|start|>assistant"))
    tags = spec(structural_tag={"format": {"type": "any_text"}})
    header = ParserState(1)
    assert after_reasoning(tags, parser_spec, header) is tags


def test_without_reasoning_and_where_the_client_says_it_begins_as_asked() -> None:
    assert [text for text, ok in allowed("special", "", ("<tool_call>", "</tool_call>")) if ok] == [
        "12"
    ]
    parser_spec = format_of(tagged(TAGS, "special"))
    asked = spec(regex="a", begin_after="x")
    parser_state = state_after_prompt(parser_spec, tagged(TAGS, "special"), [])
    assert after_reasoning(asked, parser_spec, parser_state) is asked
