"""Grammars in EBNF and in Lark."""

import json
import re

import pytest

from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.ebnf import is_ebnf, lark_of
from engine.text.grammar.spec import GrammarTextError
from engine.text.tokenizer import Tokenizer
from tests.factories.grammars import RandomWriter, spec

JSON = r"""
root ::= object  # of any values
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ( pair ("," pair)* )? "}"
pair ::= string ":" value
array ::= "[" ( value ("," value)* )? "]"
string ::= "\"" ( [^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\""
number ::= "-"? ("0" | [1-9] [0-9]{0,5}) ("." [0-9]{1,3})?
"""
SQL = r"""
root ::= "SELECT " columns " FROM " name where? order? ";"
columns ::= "*" | name (", " name){0,3}
name ::= [a-z] [a-z_0-9]{0,8}
where ::= " WHERE " condition ((" AND " | " OR ") condition){0,2}
condition ::= name (" = " | " < " | " <> ") (number | text)
order ::= " ORDER BY " name (" ASC" | " DESC")?
number ::= [0-9]{1,4}
text ::= "'" [^'\n]{0,6} "'"
"""
ARITHMETIC = """
root ::= expr
expr ::= term (("+" | "-") term){0,3}
term ::= factor ("*" factor){0,2}
factor ::= number | "(" expr ")"
number ::= "0" | [1-9] [0-9]{0,3}
"""


def _texts(grammar: str, compiler: GrammarCompiler, writer: RandomWriter) -> list[str]:
    matcher = compiler.compile(spec(grammar=grammar)).result()
    texts = (writer.write(matcher, seed) for seed in range(12))
    return [text for text in texts if text is not None]


def test_json(compiler: GrammarCompiler, writer: RandomWriter) -> None:
    texts = _texts(JSON, compiler, writer)
    assert len(texts) > 3
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_a_subset_of_sql(compiler: GrammarCompiler, writer: RandomWriter) -> None:
    texts = _texts(SQL, compiler, writer)
    name = "[a-z][a-z_0-9]{0,8}"
    condition = rf"{name} (=|<|<>) (\d{{1,4}}|'[^'\n]{{0,6}}')"
    query = (
        rf"SELECT (\*|{name}(, {name}){{0,3}}) FROM {name}"
        rf"( WHERE {condition}( (AND|OR) {condition}){{0,2}})?( ORDER BY {name}( ASC| DESC)?)?;"
    )
    assert len(texts) == 12
    assert all(re.fullmatch(query, text) for text in texts), texts


def test_arithmetic(compiler: GrammarCompiler, writer: RandomWriter) -> None:
    texts = _texts(ARITHMETIC, compiler, writer)
    assert len(texts) > 3
    assert all(isinstance(eval(text), int) for text in texts)


def test_repetitions_before_what_they_could_swallow(
    compiler: GrammarCompiler, demo: Tokenizer
) -> None:
    """The lexer must not take the longest match, as it would with longer lexemes."""
    grammar = 'root ::= [a-z]+ "x" | ("1" | "123") "24"'
    matcher = compiler.compile(spec(grammar=grammar)).result()
    for text, is_right in [
        ("abcx", True),
        ("xx", True),
        ("x", False),
        ("124", True),
        ("1232", False),
    ]:
        ids = demo.encode(text, add_special_tokens=False)
        fresh = matcher.deep_copy()
        assert (fresh.try_consume_tokens(ids) == len(ids) and fresh.is_accepting()) is is_right


def test_escapes(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    grammar = r'root ::= [\u0041-\u005A] [&~/] [\U0001F600é] "\x21\u00e9\n\"" [[] . [^\]]'
    matcher = compiler.compile(spec(grammar=grammar)).result()
    ids = demo.encode('Q~😀!é\n"[\n[', add_special_tokens=False)
    assert matcher.deep_copy().try_consume_tokens(ids) == len(ids)


def test_lark_is_taken_as_it_is(compiler: GrammarCompiler, writer: RandomWriter) -> None:
    lark = 'start: GREETING ", " /[a-z]{2,5}/\nGREETING: "hello" | "hi"'
    assert not is_ebnf(lark)
    assert all(
        re.fullmatch("(hello|hi), [a-z]{2,5}", text) for text in _texts(lark, compiler, writer)
    )


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ("expr ::= [a]", 'no rule "root"'),
        ("root ::= foo", 'rule "foo" is not defined'),
        ("root ::= (", r"Expected '\)' at line 1"),
        ('root ::= "a', "Unexpected end of input at line 1"),
        ('root ::= "\\q"', r"Invalid escape sequence \\q at line 1"),
        ('root ::= "a"\nb = "c"', "Expected ::= at line 2"),
        ("root ::= []", "is empty"),
        (r'root ::= "\ud800"', "is not a valid character"),
        ("root ::= root", 'rule "root" can never end'),
        ('root ::= "a" root', 'rule "root" can never end'),
        ('root ::= x "b"+\nx ::= y | "c" x\ny ::= "(" x ")"', 'rule "root" can never end'),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
    ],
)
def test_faults_in_ebnf_are_named_with_their_place(grammar: str, fault: str) -> None:
    with pytest.raises(GrammarTextError, match=fault):
        lark_of(grammar)


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ("start: foo", "unknown name"),
        ("foo: /a/", "start"),
        ("start: A\nA: B\nB: A", "circular"),
        ("start: a\na: b\nb: a", "nothing can match"),
        ('start: "a" start', "Too many items"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ("start: <|nothing|>", "unknown special token"),
    ],
)
def test_faults_in_lark_are_named(grammar: str, fault: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarTextError, match=fault):
        compiler.compile(spec(grammar=grammar)).result()
