"""Writes a `GrammarSpec` as the one text that llguidance compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from llguidance import LLMatcher

from engine.text.grammar.ebnf import is_ebnf, lark_of
from engine.text.grammar.json_schema import prepare_schema
from engine.text.grammar.lark_writer import LarkWriter, literal
from engine.text.grammar.regexes import portable
from engine.text.grammar.spec import GrammarSpec, GrammarTextError, check_literal
from engine.text.grammar.structural_tags import StructuralTags

_LARK_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def llguidance_texts(
    spec: GrammarSpec, special_tokens: Mapping[str, int], eos_token_ids: Collection[int] = ()
) -> Iterator[str]:
    """Yield the grammar of `spec`, then if there is one the same in another form, to be tried next.

    Args:
        spec: what is asked for.
        special_tokens: ids by text.
        eos_token_ids: those of them that end a sequence.

    Raises:
        GrammarTextError: it is wrong; the text names the field.
    """
    writer = LarkWriter(special_tokens, eos_token_ids, spec.whitespace_pattern)
    yield _text(spec, _grammars(spec, writer), LarkWriter(special_tokens, eos_token_ids))
    if spec.kind == "grammar" and is_ebnf(spec.text):
        # llguidance fails on some regular expressions that are made of parts.
        smaller = [_lark(lark_of(spec.text, large_lexemes=False))]
        yield _text(spec, smaller, LarkWriter(special_tokens, eos_token_ids))


def _text(spec: GrammarSpec, grammars: list[dict[str, Any]], writer: LarkWriter) -> str:
    if spec.begin_after:
        grammars[0]["name"] = "body"
        head = writer.up_to(spec.begin_after)
        if spec.reasoning_start:
            head = f"({writer.text(spec.reasoning_start)} {head})?"
        if spec.opening:
            head = f"{head} {writer.text(spec.opening)}"
        grammars.insert(0, _lark(writer.grammar(f"{head} @body")))
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _grammars(spec: GrammarSpec, writer: LarkWriter) -> list[dict[str, Any]]:
    match spec.kind:
        case "json_schema":
            prepared = prepare_schema(
                spec.text, strict=spec.strict, whitespace_pattern=spec.whitespace_pattern
            )
            return [{"json_schema": prepared}]
        case "regex":
            inner: list[dict[str, Any]] = json.loads(
                LLMatcher.grammar_from_regex(portable(spec.text))
            )["grammars"]
            return inner
        case "choice":
            return [_lark(_choice(json.loads(spec.text)))]
        case "grammar":
            if is_ebnf(spec.text):
                return [_lark(lark_of(spec.text))]
            for literal_text in _LARK_LITERAL.findall(spec.text):
                check_literal(literal_text)
            return [_lark(spec.text)]
    start = StructuralTags(writer, strict=spec.strict).read(spec.text)
    return [_lark(writer.grammar(start)), *writer.grammars]


def _lark(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


def _choice(choices: list[str]) -> str:
    if not choices or not any(choices):
        raise GrammarTextError("must have at least one choice that is not empty")
    return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, choices))
