"""Regular expressions mean what they mean to `re`."""

import re
from itertools import product

import pytest

from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.spec import GrammarTextError
from engine.text.tokenizer import Tokenizer
from tests.factories.grammars import RandomWriter, spec

_ATOMS = ["a", "[bc]", "(?:de|f)", r"\d", "[^g-z]", r"\.", "é", r"\w", r"[x\-\]]", "(ab)"]
_COUNTS = ["", "?", "{2}", "{1,3}", "{0,2}"]
_WHOLE = [
    *(r"\d{3}-\d{4}", r"(\+1 )?\d{3}", r"[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8}){0,2}"),
    *(r"(?:0|[1-9]\d{0,4})(?:\.\d{1,3})?", r"yes|no|maybe", r"#[0-9a-fA-F]{6}", r"(?i:ab)c"),
    *(r"^anchored$", r"a{3,5}b{2}", r"(a|ab)(c|bcd)", r"([01]\d|2[0-3]):[0-5]\d", r"\\\"/"),
    *(r"(?P<name>x)y", r"\t\n", "你好|世界", r"(?s:.){2}", r"[^\n]{1,4}", r"\s\S", r"a+?b", r"x*y"),
]
REGEXES = [
    *_WHOLE,
    *(atom + count for atom, count in product(_ATOMS, _COUNTS)),
    *(f"{a}{x}{b}{y}" for a, b in product(_ATOMS, _ATOMS[:7]) for x, y in [("{1,2}", "?")]),
    *(f"({a}|{b}){x}" for a, b in product(_ATOMS[:6], _ATOMS[3:8]) for x in ("", "{2}")),
]


def test_there_are_two_hundred() -> None:
    assert len(set(REGEXES)) >= 200


@pytest.mark.parametrize("part", range(4))
def test_random_texts_match_and_mutants_are_judged_as_by_re(
    part: int, compiler: GrammarCompiler, writer: RandomWriter, demo: Tokenizer
) -> None:
    num_texts = 0
    for regex in REGEXES[part::4]:
        matcher = compiler.compile(spec(regex=regex)).result()
        for seed in range(2):
            text = writer.write(matcher, seed)
            if text is None:
                continue
            num_texts += 1
            assert re.fullmatch(regex, text), (regex, text)
            for other in {text + "a", text[1:], text[::-1], "b" + text, text.swapcase()}:
                ids = demo.encode(other, add_special_tokens=False)
                fresh = matcher.deep_copy()
                taken = fresh.try_consume_tokens(ids) == len(ids) and fresh.is_accepting()
                matches = bool(re.fullmatch(regex, other))
                # Python's \d and \w have other characters than ASCII's.
                assert taken == matches if other.isascii() else taken <= matches, (regex, other)
    assert num_texts > 90


@pytest.mark.parametrize(
    ("regex", "fault"),
    [
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "backreferences"),
        ("(a", "unclosed group"),
        ("[a", "unclosed"),
        ("a{2,1}", "repetition"),
        (r"\bfoo\b", "lookarounds"),
        (r"[^\s\S]", "nothing can match"),
        ("(" * 1000 + "a" + ")" * 1000, "nest"),
        (r"(\d{1,50}|\w{1,50}|[a-f]{1,50}){1,50}", "too many expressions"),
    ],
)
def test_what_is_refused(regex: str, fault: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarTextError, match=fault):
        compiler.compile(spec(regex=regex)).result()
