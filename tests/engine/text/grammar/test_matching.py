"""Vocabularies, masks, choices, and where a grammar begins."""

import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher

from engine.errors import RequestError, UnsupportedError
from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.compose import llguidance_texts
from engine.text.grammar.host_budget import HostBudget
from engine.text.grammar.matcher import SequenceGrammar
from engine.text.grammar.spec import GrammarKind, GrammarSpec, GrammarTextError
from engine.text.grammar.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer
from tests.engine.text.other_decoders import word_piece_tokenizer
from tests.factories.grammars import allowed_ids, demo_tokenizer, follows, spec
from tests.factories.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

ANYTHING = GrammarSpec(kind="regex", text="(?s:.*)")


def _started(vocabulary: Vocabulary, asked: GrammarSpec) -> SequenceGrammar:
    tokenizer = vocabulary.ll_tokenizer()
    text = next(llguidance_texts(asked, vocabulary.special_tokens(tokenizer)))
    return SequenceGrammar(LLMatcher(tokenizer, text, log_level=0), vocabulary.num_ids)


def _tokenizers() -> dict[str, Tokenizer]:
    return {
        "byte level": Tokenizer(byte_level_tokenizer()),
        "Llama 2": Tokenizer(byte_fallback_tokenizer()),
        "Gemma": Tokenizer(byte_fallback_tokenizer(strip=False)),
        "bundled": demo_tokenizer(),
    }


@pytest.mark.parametrize("name", _tokenizers())
def test_tokens_have_the_text_that_they_decode_to(name: str) -> None:
    tokenizer = _tokenizers()[name]
    tokens = Vocabulary.of(tokenizer, tokenizer.vocab_size, [2]).ll_tokenizer()
    for token_id in tokenizer.text_token_ids():
        assert tokens.decode_bytes([token_id]).decode() == tokenizer.token_text(token_id)


@pytest.mark.parametrize("name", _tokenizers())
def test_a_grammar_allows_text_and_its_end_alone(name: str) -> None:
    """Neither special tokens, or what looks like them, nor ids that the tokenizer lacks."""
    tokenizer = _tokenizers()[name]
    size, [end] = tokenizer.vocab_size + 70, sorted(tokenizer.special_ids)[-1:]
    vocabulary = Vocabulary.of(tokenizer, size, [end])
    grammar = _started(vocabulary, ANYTHING)
    mask = grammar.mask(size)
    assert mask.shape == (-(-size // 32),)
    allowed = set(allowed_ids(mask).tolist())
    special = vocabulary.special_tokens(vocabulary.ll_tokenizer())
    text_ids = set(tokenizer.text_token_ids()) - set(special.values())
    assert allowed & set(special.values()) == {end}
    assert tokenizer.special_ids <= set(special.values())
    assert "<tool call>" not in tokenizer.added_tokens or "<tool call>" in special
    assert text_ids <= allowed
    assert max(allowed) < tokenizer.vocab_size


def test_a_model_with_fewer_logits_than_tokens() -> None:
    tokenizer = demo_tokenizer()
    vocabulary = Vocabulary.of(tokenizer, 1000, [2])
    mask = _started(vocabulary, ANYTHING).mask(1000)
    assert mask.shape == (32,)
    assert allowed_ids(mask).max() == 999


def test_a_checkpoint_without_an_end_of_sequence_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="names no end-of-sequence token"):
        Vocabulary.of(demo_tokenizer(), 1280, []).ll_tokenizer()


def test_a_tokenizer_that_is_not_known_is_refused() -> None:
    tokenizer = Tokenizer(word_piece_tokenizer())
    with pytest.raises(UnsupportedError, match="structured_outputs: not supported"):
        Vocabulary.of(tokenizer, tokenizer.vocab_size, [0]).ll_tokenizer()


def test_long_runs_without_a_choice_get_the_masks_that_their_grammar_has(
    compiler: GrammarCompiler, vocabulary: Vocabulary, demo: Tokenizer
) -> None:
    """Without computing each of them: a mask of 10,000 bytes takes 10 ms."""
    run = "".join(random.Random(3).choices("abc 19é", k=700))
    start = compiler.compile(spec(regex=f"[xy]{{20}}{run}[xy]")).result()
    grammar, computed = SequenceGrammar(start, vocabulary.num_ids), start.deep_copy()
    num_known = 0
    for token_id in demo.encode("xy" * 10 + run + "x", add_special_tokens=False):
        num_known += len(grammar.forced()) > 0
        mask = np.frombuffer(computed.compute_bitmask(), dtype=np.int32)
        filled = grammar.mask(vocabulary.size)
        np.testing.assert_array_equal(filled, mask[: len(filled)])
        if not filled[token_id // 32] >> token_id % 32 & 1:
            [token_id] = allowed_ids(filled)  # the run's tokens begin where the choice has ended
        assert computed.consume_token(token_id)
        assert grammar.needs_advance(token_id) == (not grammar.forced())
        grammar.take(token_id)
    assert num_known > 300


def test_advance_by_an_executor_is_that_of_the_calling_thread(
    compiler: GrammarCompiler, vocabulary: Vocabulary, demo: Tokenizer
) -> None:
    start = compiler.compile(spec(regex="([a-z]{2}, ){3}x{30}!")).result()
    one, other = (SequenceGrammar(start, vocabulary.num_ids) for _ in range(2))
    executor = LLExecutor(1)
    for token_id in demo.encode("ab, cd, ef, ", add_special_tokens=False):
        one.advance(token_id)
        other.advance(token_id, executor)
        assert one.take(token_id) is other.take(token_id) is False
        assert one.forced() == other.forced()
        np.testing.assert_array_equal(one.mask(vocabulary.size), other.mask(vocabulary.size))
    assert len(one.forced()) > 3


def test_a_token_drawn_in_vain_gives_way_to_another(
    compiler: GrammarCompiler, vocabulary: Vocabulary, demo: Tokenizer
) -> None:
    start = compiler.compile(spec(regex="ax{20}y|b[cd]")).result()
    a, b, c = (demo.encode(text, add_special_tokens=False)[0] for text in "abc")
    grammar, plain = (SequenceGrammar(start, vocabulary.num_ids) for _ in range(2))
    before = grammar.mask(vocabulary.size)
    for drawn in (a, b, a, 2, b):  # 2, the end, is not allowed here
        if drawn != 2:
            grammar.advance(drawn)
        np.testing.assert_array_equal(grammar.mask(vocabulary.size), before)
        assert not grammar.forced()
    assert not grammar.take(b)
    plain.take(b)
    np.testing.assert_array_equal(grammar.mask(vocabulary.size), plain.mask(vocabulary.size))
    grammar.advance(c)
    assert grammar.take(c)
    late = SequenceGrammar(start, vocabulary.num_ids)
    late.take(b)
    late.advance(c)  # the text is over, and the token is drawn again
    late.advance(demo.encode("d", add_special_tokens=False)[0])
    assert late.take(demo.encode("d", add_special_tokens=False)[0])


def test_a_fault_of_a_mask_comes_with_the_next_token(
    compiler: GrammarCompiler, vocabulary: Vocabulary, demo: Tokenizer
) -> None:
    start = compiler.compile(spec(regex="[a-z]+")).result()
    grammar = SequenceGrammar(start, vocabulary.num_ids)
    grammar.matcher = None  # type: ignore[assignment]
    token_id = demo.encode("a", add_special_tokens=False)[-1]
    grammar.advance(token_id)
    assert not grammar.needs_advance(token_id)
    with pytest.raises(AttributeError):
        grammar.take(token_id)


class _Clock:
    """A clock by which each token takes as long as it is told."""

    def __init__(self, *costs: float) -> None:
        self._costs = iter(costs)
        self._now, self._began = 0.0, False

    def __call__(self) -> float:
        self._began = not self._began
        self._now += 0 if self._began else next(self._costs)
        return self._now


@pytest.mark.parametrize(
    ("kind", "costs", "num_taken"),
    [
        ("json_schema", [0.3], 0),
        ("json_schema", [0.2, 0.01, 0.2], 2),
        ("regex", [0.1, 0.05, 0.05, 0.05, 0.1], 4),
        ("structural_tag", [0.00745] * 400, 102),
        ("grammar", [0.00295] * 400, 105),
        ("grammar", [0.1, 0.1], 1),
    ],
)
def test_a_sequence_that_costs_too_much_ends_as_too_ambiguous(
    kind: GrammarKind,
    costs: list[float],
    num_taken: int,
    compiler: GrammarCompiler,
    vocabulary: Vocabulary,
    demo: Tokenizer,
) -> None:
    start = compiler.compile(spec(regex="[ab]*")).result()
    [a] = demo.encode("a", add_special_tokens=False)
    budget, clock = HostBudget(kind), _Clock(*costs)
    grammar = SequenceGrammar(start, vocabulary.num_ids, budget=budget, clock=clock)
    for _ in range(num_taken):
        assert not grammar.take(a)
        assert not grammar.forced()
    assert not grammar.take(a)  # allowed; what follows cannot be known
    assert not grammar.mask(vocabulary.size).any()
    with pytest.raises(RequestError, match="the grammar cannot be followed: is too ambiguous"):
        grammar.forced()
    with pytest.raises(RequestError, match="is too ambiguous"):
        grammar.take(a)


def test_a_grammar_is_fast_while_it_is_cheap_on_average(
    compiler: GrammarCompiler, vocabulary: Vocabulary, demo: Tokenizer
) -> None:
    start = compiler.compile(spec(regex="[ab]*")).result()
    [a] = demo.encode("a", add_special_tokens=False)
    shared = HostBudget()
    clock = _Clock(0.005, 0.004, *[0.0] * 20)  # 5 ms, and 1 ms for each token
    one = SequenceGrammar(start, vocabulary.num_ids, shared=shared, clock=clock)
    other = SequenceGrammar(start, vocabulary.num_ids, shared=shared, clock=clock)
    one.take(a)
    assert one.is_fast
    one.take(a)
    assert not one.is_fast
    assert not other.is_fast, "they wait for the same lexer"
    for _ in range(10):
        other.take(a)
    assert one.is_fast


def test_the_end_and_what_the_grammar_does_not_allow(
    compiler: GrammarCompiler, demo: Tokenizer
) -> None:
    start = compiler.compile(spec(choice=["a", "ab"])).result()
    a, b = (demo.encode(text, add_special_tokens=False)[0] for text in "ab")
    grammar = SequenceGrammar(start, demo.vocab_size)
    assert not grammar.take(a)  # "ab" may follow
    assert grammar.take(b)
    with pytest.raises(RequestError, match="the grammar cannot be followed"):
        SequenceGrammar(start, demo.vocab_size).take(b)
    ended = SequenceGrammar(start, demo.vocab_size)
    assert not ended.take(a)
    assert ended.take(2)  # the end of the sequence


def test_a_sequence_without_an_allowed_token_fails_when_it_gets_one() -> None:
    """The model has no logit for the only token that the grammar allows."""
    tokenizer = Tokenizer(byte_level_tokenizer())
    vocabulary = Vocabulary.of(tokenizer, 320, [0])
    grammar = _started(vocabulary, spec(choice=["日本 "]))
    last = tokenizer.encode("日本 ", add_special_tokens=False)[-1]
    assert last >= 320
    for token_id in tokenizer.encode("日本", add_special_tokens=False):
        grammar.take(token_id)
    assert not grammar.mask(1).any()
    with pytest.raises(RequestError, match="cannot be followed"):
        grammar.take(5)


@pytest.mark.parametrize("tag", ["</think>", "<|im_start|>"])
@pytest.mark.parametrize(
    "asked", [{"json": {"type": "integer"}}, {"regex": "[0-9]+"}, {"grammar": "root ::= [0-9]+"}]
)
def test_a_grammar_begins_after_a_tag(
    asked: dict[str, Any], tag: str, compiler: GrammarCompiler, demo: Tokenizer
) -> None:
    start = compiler.compile(spec(**asked, begin_after=tag)).result()
    assert follows(start, 'any "text"\n', demo) == (True, False)
    assert follows(start, f"any 12 {tag}", demo) == (True, False)
    assert follows(start, f"any {tag}12", demo) == (True, True)
    assert not follows(start, f"any {tag}x", demo)[0]


@pytest.mark.parametrize("choices", [[], [""]])
def test_empty_choices_are_refused(choices: list[str], compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarTextError, match="at least one choice"):
        compiler.compile(spec(choice=choices)).result()
