"""The work for a token is bounded by a constant, whatever the tokens are and however many came.

Counted are the ids that the tokenizer is given and the lines of Python that run, not seconds.
"""

import random
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import cycle, islice, takewhile
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.stop.automaton import StopAutomaton
from engine.text.stop.checker import StopChecker
from engine.text.tokenizer import Tokenizer
from tests.engine.text.conftest import BUILDERS
from tests.engine.text.strategies import token_ids

_NUM_TOKENS = 600
_MOST_IDS = 250  # per token, in the mean
_MOST_WINDOW = 20  # tokens
_MOST_LINES = 200  # per token


class CountingTokenizer(Tokenizer):
    """Counts the ids that it is given."""

    num_ids = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_ids += 1 + len(ids)
        return super().decode(ids, skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        self.num_ids += 1
        return super().id_to_token(token_id)


@cache
def counting_detokenizer(kind: str) -> Detokenizer:
    return Detokenizer(CountingTokenizer(BUILDERS[kind]()))


@pytest.fixture(scope="module", params=BUILDERS)
def detokenizer(request: pytest.FixtureRequest) -> Detokenizer:
    return counting_detokenizer(request.param)


def count(detokenizer: Detokenizer, work: Callable[[], object]) -> int:
    """Return how many ids `work` gives to the tokenizer."""
    tokenizer = detokenizer.tokenizer
    assert isinstance(tokenizer, CountingTokenizer)
    tokenizer.num_ids = 0
    work()
    return tokenizer.num_ids


def repeated(pattern: Sequence[int]) -> list[int]:
    return list(islice(cycle(pattern), _NUM_TOKENS))


def search(detokenizer: Detokenizer, prompt: list[int], output: list[int], *, skip: bool) -> int:
    """Return how many ids it takes to look for a stop string after each token of `output`."""
    stop = StopAutomaton(["\x00never\x00"])
    checker = StopChecker(detokenizer, prompt, stop, skip_special_tokens=skip)

    def work() -> None:
        for token_id in output:
            checker.append(token_id)
        checker.finish()

    return count(detokenizer, work)


def test_tokens_without_text_cost_next_to_nothing(detokenizer: Detokenizer) -> None:
    """Special tokens that are skipped, and ids that the tokenizer does not have."""
    tokenizer = detokenizer.tokenizer
    for token_id in (min(tokenizer.special_ids), tokenizer.vocab_size + 1):
        assert search(detokenizer, [], [token_id] * _NUM_TOKENS, skip=True) <= 5 * _NUM_TOKENS


def test_of_each_token_the_second_hundred_costs_no_more_than_the_first(
    detokenizer: Detokenizer,
) -> None:
    """Among them all byte-fallback tokens, and those that are text only after others."""
    for token_id in range(detokenizer.tokenizer.vocab_size):
        first, both = (
            search(detokenizer, [], [token_id] * length, skip=True) for length in (100, 200)
        )
        assert both <= 2.2 * first + 100


def test_a_long_run_of_fallback_bytes_costs_no_more_per_byte() -> None:
    detokenizer = counting_detokenizer("byte_fallback")
    tokenizer = detokenizer.tokenizer
    emoji = tokenizer.encode("🦊", add_special_tokens=False)[-4:]
    assert set(emoji) <= tokenizer.byte_fallback_ids
    end = tokenizer.encode("a")[-1]
    for pattern in (emoji, [*emoji, 2], emoji[:1], [*emoji, end]):
        num_ids = search(detokenizer, [], [*repeated(pattern), end], skip=True)
        assert num_ids <= 60 * _NUM_TOKENS


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_pattern_of_tokens_costs_no_more_the_longer_it_goes_on(
    detokenizer: Detokenizer, data: st.DataObject
) -> None:
    pattern = data.draw(token_ids(detokenizer, max_pieces=3).filter(bool))
    prompt = data.draw(token_ids(detokenizer, max_pieces=2))
    skip = data.draw(st.booleans())
    num_ids = search(detokenizer, prompt, repeated(pattern), skip=skip)
    assert num_ids <= _MOST_IDS * _NUM_TOKENS


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_window_is_short_but_for_an_open_run_of_bytes(
    detokenizer: Detokenizer, data: st.DataObject
) -> None:
    pattern = data.draw(token_ids(detokenizer, max_pieces=3).filter(bool))
    skip = data.draw(st.booleans())
    tokenizer = detokenizer.tokenizer
    window: list[int] = []
    for token_id in repeated(pattern)[:200]:
        window = detokenizer.next_window(window, [token_id], skip_special_tokens=skip)
        run = [*takewhile(tokenizer.byte_fallback_ids.__contains__, reversed(window))][::-1]
        try:
            bytes(int(str(tokenizer.id_to_token(i))[1:-1], 16) for i in run).decode()
        except UnicodeDecodeError as error:
            run = run if error.reason == "unexpected end of data" else []
        assert len(window) - len(run) <= _MOST_WINDOW


def test_a_prompt_of_one_token_is_looked_at_once(detokenizer: Detokenizer) -> None:
    for token_id in range(detokenizer.tokenizer.vocab_size + 2):
        prompt = [token_id] * 300
        num_ids = count(detokenizer, partial(detokenizer.prompt_window, prompt))
        assert num_ids <= 5 * len(prompt)
        assert len(detokenizer.prompt_window(prompt)) <= _MOST_WINDOW


def lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python `work` runs."""
    number = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal number
        number += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return number


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "few_bytes", "metaspace"])
def test_no_token_is_much_work_for_the_search(kind: str) -> None:
    """Not even the one that ends a run of byte-fallback tokens, or the end of the sequence."""
    detokenizer = Detokenizer(Tokenizer(BUILDERS[kind]()))
    tokenizer = detokenizer.tokenizer
    stop = StopAutomaton(["\N{REPLACEMENT CHARACTER}" * 20 + "x", "🦊" * 20 + "x"])
    emoji = tokenizer.encode("🦊", add_special_tokens=False)[-4:]
    for pattern in (emoji, [*emoji, 2], emoji[:1], [0], [tokenizer.vocab_size + 1]):
        checker = StopChecker(detokenizer, [], stop, skip_special_tokens=True)
        tokens = [*pattern * 10, 5, *pattern * 10, tokenizer.encode("a")[-1], *pattern * 200]
        for token_id in (*tokens, tokens[-1], 5):
            checker.append(token_id)  # what is computed once for each token and state
        checker = StopChecker(detokenizer, [], stop, skip_special_tokens=True)
        work = [lines(partial(checker.append, token_id)) for token_id in [*tokens, tokens[-1], 5]]
        assert max(work) <= _MOST_LINES
        assert lines(checker.finish) <= _MOST_LINES


def test_an_automaton_does_not_remember_all_texts() -> None:
    choose = random.Random(0).choices
    words = ["".join(choose("ab", k=32)) for _ in range(256)]
    automaton, other = StopAutomaton(words), StopAutomaton(words)
    state = other_state = 0
    tracemalloc.start()
    try:
        for _ in range(20_000):
            text = "".join(choose("abc", k=20))
            state, _ = automaton.advance(state, text)
            for character in text:
                other_state = other.step(other_state, character)
            assert state == other_state
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()
