"""Grammars that take too long or end the process that tries them end nothing else."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher, LLParserLimits

from engine.errors import TridentError, UnsupportedError
from engine.text.grammar.compiler import GrammarCompiler, Sandbox, _await
from engine.text.grammar.spec import MAX_LITERAL_BYTES, GrammarSpec, GrammarTextError
from engine.text.grammar.trial import limits_of
from engine.text.grammar.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer
from tests.engine.text.grammar.test_ebnf import ARITHMETIC, JSON, SQL
from tests.engine.text.other_decoders import word_piece_tokenizer
from tests.factories.grammars import spec
from tests.factories.json_schemas import FAMILIES

# 500 s of work for llguidance; a stack of some megabytes.
_EXPONENTIAL = {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)]}
_LONG = "a" * (MAX_LITERAL_BYTES + 1)
_DEEP = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(8_000)) + '\na8000: "a"'


@pytest.fixture(autouse=True)
def no_lack_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine does not end a trial before its own limits do."""
    monkeypatch.setattr("engine.text.grammar.compiler._MAX_WALL_S", 600.0)


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(spec(regex="once"))
    assert compiler.compile(spec(regex="once")) is first
    assert compiler.compile(spec(regex="twice")) is not first
    assert first.result() is not None


class _Gate(GrammarCompiler):
    """Notes what is compiled; what `waits` is not, before it is opened."""

    def __init__(self, vocabulary: Vocabulary, waits: str) -> None:
        super().__init__(vocabulary)
        self.texts: list[str] = []
        self.began, self.opened = threading.Event(), threading.Event()
        self._waits = waits

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        self.texts.append(spec.text)
        if spec.text == self._waits:
            self.began.set()
            assert self.opened.wait(30)
        return super()._compile(spec)


@pytest.fixture
def gate(vocabulary: Vocabulary) -> Iterator[_Gate]:
    """One that compiles a large grammar of the tenant "many"."""
    compiler = _Gate(vocabulary, "first")
    compiler.compile(spec(regex="first"), "many")
    assert compiler.began.wait(30)
    yield compiler
    compiler.opened.set()
    compiler.close()


def test_grammars_of_tenants_are_compiled_in_turn(gate: _Gate) -> None:
    """A stranger waits for one of each other tenant at most, however many there are."""
    futures = [gate.compile(spec(regex=f"many{i}"), "many") for i in range(9)]
    futures += [gate.compile(spec(regex="few"), "few"), gate.compile(spec(regex="many8"), "few")]
    assert futures[-1] is futures[8]  # shared, in the turn of whose comes first
    gate.opened.set()
    for future in futures:
        assert future.result(timeout=60) is not None
    assert gate.texts[1] == "few"
    assert gate.texts.index("many8") <= 4
    assert sorted(gate.texts) == sorted(["first", "few", *(f"many{i}" for i in range(9))])


def test_small_schemas_are_compiled_beside_a_large_grammar(gate: _Gate) -> None:
    """Also those of its tenant: they do not wait for it."""
    large = gate.compile(spec(regex="second"), "many")
    for tenant in ("many", "few"):
        small = gate.compile(spec(json={"type": "integer", "minimum": len(tenant)}), tenant)
        assert small.result(timeout=60) is not None
    assert not large.done()


def test_a_cancelled_compilation_is_done_again(compiler: GrammarCompiler) -> None:
    futures = [compiler.compile(spec(regex=f"cancelled{i}")) for i in range(8)]
    if futures[-1].cancel():
        assert compiler.compile(spec(regex="cancelled7")).result() is not None
    assert futures[0].result() is not None


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"json": _EXPONENTIAL}, "is too complex: compiling it takes more than 2 s"),
        ({"grammar": _DEEP}, "is too complex: compiling it takes more than .* the stack"),
    ],
)
def test_the_process_that_a_grammar_ends_is_replaced(
    asked: dict[str, Any], fault: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(GrammarTextError, match=fault):
        compiler.compile(spec(**asked)).result(timeout=60)
    assert compiler.compile(spec(regex=f"after{len(fault)}")).result() is not None


@pytest.mark.parametrize(
    "grammar",
    [
        "start: s\ns: s s s | s s | /[a-z ]/",
        "start: s\ns: s s | c\nc: /[a-z]/",
        'start: x\nx: "(" x* ")" | c | x x\nc: /[a-z]/',
        "root ::= s\ns ::= s s | [a-z]",
    ],
)
def test_compile_ambiguous_grammar_is_refused(grammar: str, compiler: GrammarCompiler) -> None:
    """The cost of a mask grows with a high power of the length of the text."""
    with pytest.raises(GrammarTextError, match="is too ambiguous: after "):
        compiler.compile(spec(grammar=grammar)).result(timeout=60)


@pytest.mark.parametrize("grammar", ['start: "a"', 'root ::= "a" root | "b"'])
def test_limits_of_rules_of_clients_are_llguidances(grammar: str) -> None:
    """Its masks take longer with more items in a row, which the rules of a client can cause."""
    limit = LLParserLimits().max_items_in_row
    assert limits_of(spec(grammar=grammar)).max_items_in_row == limit
    assert limits_of(spec(json={})).max_items_in_row > limit  # which is too few for wide objects


@pytest.mark.parametrize("is_within", [True, False])
def test_compile_rules_of_a_client_more_items_than_llguidances_limit_are_refused(
    is_within: bool, compiler: GrammarCompiler
) -> None:
    """One item for each rule that may begin."""
    numbers = range(LLParserLimits().max_items_in_row + (-100 if is_within else 100))
    rules = "\n".join(f'a{i}: T "{i}"' for i in numbers)
    asked = spec(grammar=f"start: {' | '.join(f'a{i}' for i in numbers)}\n{rules}\nT: /[a-z]/")
    refusal = compiler.compile(asked).exception(timeout=60)
    assert is_within == (refusal is None)
    assert is_within or "items; max is" in str(refusal)


@pytest.mark.parametrize("num_tokens", [199, 200])
def test_compile_trial_walks_200_tokens(num_tokens: int, compiler: GrammarCompiler) -> None:
    """What is wrong with a grammar after so many tokens is found before its request runs."""
    # The vocabulary has no token of two such letters.
    asked = spec(grammar=f'start: /[QZ]{{{num_tokens}}}/ r{{17000}}\nr: "b "')
    refusal = compiler.compile(asked).exception(timeout=60)
    assert (num_tokens < 200) == ("leaves no choice about" in str(refusal))


def test_trials_have_a_lower_priority_than_this_process_whatever_it_has() -> None:
    code = """
import os, psutil
from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.vocabulary import Vocabulary
from tests.factories.grammars import demo_tokenizer, spec

before = os.getpriority(os.PRIO_PROCESS, 0)
os.nice(3)
tokenizer = demo_tokenizer()
compiler = GrammarCompiler(Vocabulary.of(tokenizer, tokenizer.vocab_size, [2]))
compiler.compile(spec(regex="a")).result()
compiler.compile(spec(choice=["a"])).result()
print({child.nice() == min(before + 13, 19) for child in psutil.Process().children()})
compiler.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{True}\n", done.stderr


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"properties": {"a": {"const": {"b": [_LONG]}}}}},
        {"json": {"items": {"enum": ["", _LONG]}}},
        {"json": {"properties": {_LONG: {}}}},
        {"json": {"anyOf": [{"pattern": _LONG}]}},
        {"choice": ["", _LONG]},
        {"structural_tag": {"format": {"type": "const_string", "value": _LONG}}},
        {"grammar": f'root ::= [a-z]+ "{_LONG}"'},
        {"grammar": f'start: /[a-z]+/ "{_LONG}"'},
    ],
)
def test_texts_are_bounded_that_must_follow_as_they_are(
    asked: dict[str, Any], compiler: GrammarCompiler
) -> None:
    """All tokens of one are found at once, which the other sequences wait for."""
    with pytest.raises(GrammarTextError, match=f"has {len(_LONG)} bytes; at most"):
        compiler.compile(spec(**asked)).result(timeout=60)


_HALF = "b " * (MAX_LITERAL_BYTES // 2)
_DOUBLED = "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(8))


@pytest.mark.parametrize(
    "asked",
    [
        {
            "structural_tag": {
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "const_string", "value": _HALF}] * 30,
                }
            }
        },
        {"grammar": f'start: a0\n{_DOUBLED}a8: "{_HALF[:1000]}"'},
        {"grammar": f'root ::= ("{_HALF[:1000]}"){{300}}'},
        {"regex": r"(b ){100}" * 400},
    ],
)
def test_what_many_texts_force_is_bounded_together(
    asked: dict[str, Any], compiler: GrammarCompiler
) -> None:
    for begin_after in ("", "</think>"):
        later = spec(**asked).model_copy(update={"begin_after": begin_after})
        with pytest.raises(GrammarTextError, match=r"leaves no choice about .* at most 32768 are"):
            compiler.compile(later).result(timeout=60)


def test_this_process_goes_on_while_a_large_grammar_compiles(compiler: GrammarCompiler) -> None:
    """The interpreter is held neither by the trial nor by compiling for use: 0.2 s of work each."""
    future = compiler.compile(spec(json={"enum": [f"value {i}" for i in range(30_000)]}))
    num_turns = 0
    while not future.done():
        time.sleep(0.001)
        num_turns += 1
    assert future.result() is not None
    assert num_turns > 50


def test_the_child_ends_with_the_compiler(vocabulary: Vocabulary) -> None:
    children = set(psutil.Process().children())
    compiler = GrammarCompiler(vocabulary)
    compiler.compile(spec(choice=["a"])).result()
    [child] = set(psutil.Process().children()) - children
    compiler.close()
    assert not child.is_running()


def test_an_unknown_tokenizer_fails_the_grammars_alone() -> None:
    tokenizer = Tokenizer(word_piece_tokenizer())
    compiler = GrammarCompiler(Vocabulary.of(tokenizer, tokenizer.vocab_size, [0]))
    with pytest.raises(UnsupportedError, match="not supported with this checkpoint's tokenizer"):
        compiler.compile(spec(regex="a")).result()
    compiler.close()


def test_a_child_that_cannot_start_is_reported(vocabulary: Vocabulary) -> None:
    sandbox = Sandbox(vocabulary, module="engine.text.grammar.nothing")
    with pytest.raises(TridentError, match="cannot be started"):
        sandbox.text_of(spec(regex="a"))


def test_a_child_that_is_ended_meanwhile_is_reported(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process ends while another thread waits for a trial."""
    sandbox = Sandbox(vocabulary)
    with monkeypatch.context() as patch:
        patch.setattr("engine.text.grammar.compiler._await", lambda *_: sandbox.close())
        with pytest.raises(TridentError, match="cannot be started"):
            sandbox.start()
    sandbox.start()
    monkeypatch.setattr("engine.text.grammar.compiler._await", lambda *_: sandbox.close())
    with pytest.raises(TridentError, match="was killed; try again"):
        sandbox.text_of(spec(regex="a"))


@pytest.fixture
def child(own_compiler: GrammarCompiler) -> psutil.Process:
    """The process of `own_compiler` that tries grammars."""
    others = set(psutil.Process().children())
    own_compiler.compile(spec(choice=["a"])).result()
    (started,) = set(psutil.Process().children()) - others
    return started


@pytest.fixture
def own_compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary)
    yield compiler
    compiler.close()


def test_a_child_that_was_killed_while_it_waited_harms_no_grammar(
    own_compiler: GrammarCompiler, child: psutil.Process
) -> None:
    child.kill()
    psutil.wait_procs([child], timeout=10)
    assert own_compiler.compile(spec(choice=["b"])).result() is not None


@pytest.mark.parametrize("fault", ["was killed", "within 0.3 s"])
def test_a_trial_that_the_machine_ended_is_repeated_for_the_next_request(
    fault: str,
    own_compiler: GrammarCompiler,
    child: psutil.Process,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill_and_wait(waited_for: subprocess.Popen[bytes], *limits: float) -> None:
        if waited_for.pid == child.pid:  # and not the second thread's, which starts meanwhile
            child.kill()
        _await(waited_for, *limits)

    if fault == "was killed":
        monkeypatch.setattr("engine.text.grammar.compiler._await", kill_and_wait)
    else:
        monkeypatch.setattr("engine.text.grammar.compiler._MAX_WALL_S", 0.3)
    child.suspend()
    error = own_compiler.compile(spec(regex="b")).exception(timeout=60)
    assert isinstance(error, TridentError)
    assert fault in str(error)
    monkeypatch.undo()
    assert own_compiler.compile(spec(regex="b")).result() is not None


def test_a_child_that_could_not_start_once_is_started_for_the_next_request(
    own_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    with pytest.raises(TridentError, match="cannot be started"):
        own_compiler.compile(spec(regex="a")).result()
    monkeypatch.undo()
    assert own_compiler.compile(spec(regex="a")).result() is not None


def _mutants(text: str, draw: random.Random) -> str:
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text))
        piece = text[at : at + draw.randint(1, 12)]
        text = draw.choice(
            [
                text[:at] + text[at + 1 :],
                text[:at] + piece * draw.choice([2, 30]) + text[at:],
                text[:at] + draw.choice('()[]{}|*+?"\\/:=#~&^$.,0\n\u00e9') + text[at:],
            ]
        )
    return text


@pytest.mark.parametrize("kind", ["grammar", "regex", "json"])
def test_mutated_grammars_are_compiled_or_refused(kind: str, compiler: GrammarCompiler) -> None:
    draw = random.Random(5)
    seeds = {
        "grammar": [JSON, SQL, ARITHMETIC, 'start: A b\nA: /x+/ & ~/xx/\nb[lazy]: /.*y/ | "z"i'],
        "regex": [r"(\d{1,3}\.){3}\d{1,3}", r"[^a-z]*(foo|bar){2,5}?", r"(?i:a)\p{Lu}\x{41}"],
        "json": [str(schema).replace("'", '"') for schema in FAMILIES["tools"][40:44]],
    }
    num_refused = 0
    for _ in range(120):
        text = _mutants(draw.choice(seeds[kind]), draw)
        refusal = compiler.compile(spec(**{kind: text})).exception(timeout=60)
        if refusal is not None:
            num_refused += 1
            assert isinstance(refusal, GrammarTextError)
            assert str(refusal)
            assert "panic" not in str(refusal)
    assert num_refused > 20
