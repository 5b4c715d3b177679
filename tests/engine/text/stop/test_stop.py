"""Stop strings: the client's text is the full decode up to the first match, however released."""

from itertools import takewhile
from operator import eq
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.stop.automaton import StopAutomaton, StopMatch
from engine.text.stop.checker import StopChecker
from tests.engine.text.conftest import token_flags
from tests.engine.text.strategies import sequences

# Each of six tokenizers takes so many.
_FEWER = settings(max_examples=settings.default.max_examples // 2)  # type: ignore[union-attr]


class Stopping(NamedTuple):
    """The parameters of a request that concern stop strings."""

    stop: list[str]
    min_tokens: int
    include: bool


class Expected(NamedTuple):
    """What a request must end with."""

    num_tokens: int
    text: str
    stop: str | None


def first_match(text: str, stop: list[str], after: int, begin: int) -> StopMatch | None:
    """Find, by looking everywhere from `begin` on, the match that ends first behind `after`."""
    matches = [
        StopMatch(word, end - len(word), end)
        for end in range(after + 1, len(text) + 1)
        for word in stop
        if text[begin:end].endswith(word)
    ]
    return min(matches, key=lambda match: (match.end, match.start), default=None)


def oracle(
    detokenizer: Detokenizer, prompt: list[int], output: list[int], skip: bool, stopping: Stopping
) -> Expected:
    """Decode everything anew after each token, and cut at the first match.

    What the text has in common with that of the prompt alone is not searched.
    """
    alone = detokenizer.delta(prompt, [], final=True, skip_special_tokens=skip)

    def find(text: str, after: int) -> StopMatch | None:
        return first_match(
            text, stopping.stop, after, sum(1 for _ in takewhile(bool, map(eq, alone, text)))
        )

    def text_of(count: int, *, final: bool) -> str:
        return detokenizer.delta(prompt, output[:count], final=final, skip_special_tokens=skip)

    def expected(count: int, match: StopMatch | None) -> Expected:
        text = text_of(count, final=True)
        if match is None:
            return Expected(count, text, None)
        return Expected(count, text[: match.end if stopping.include else match.start], match.stop)

    seen = 0
    for count in range(1, len(output) + 1):
        text = text_of(count, final=False)
        match = find(text, seen)
        seen = len(text)
        if match is not None and count >= stopping.min_tokens:
            return expected(count, match)
    match = find(text_of(len(output), final=True), seen)
    return expected(len(output), match if len(output) >= stopping.min_tokens else None)


@st.composite
def stoppings(draw: st.DrawFn, text: str) -> Stopping:
    """Draw stop strings, most of them out of `text`, so that they match and nearly match."""
    words = [draw(st.text("st op\N{REPLACEMENT CHARACTER}你é", min_size=1, max_size=3))]
    for _ in range(draw(st.integers(0, 3)) if text else 0):
        start = draw(st.integers(0, len(text) - 1))
        word = text[start : start + draw(st.integers(1, 5))]
        words.append(word + draw(st.sampled_from(["", "", "x"])))
    return Stopping(words, draw(st.sampled_from([0, 0, 2, 5])), draw(st.booleans()))


@pytest.mark.parametrize("appends", ["all", "watched"])
@_FEWER
@given(data=st.data())
def test_client_text_is_the_full_decode_cut_at_the_first_match(
    detokenizer: Detokenizer, appends: str, data: st.DataObject
) -> None:
    """Whether each token is appended, or only those that the checker watches for."""
    drawn, output, skip = data.draw(sequences(detokenizer))
    prompt = detokenizer.prompt_window(drawn, skip_special_tokens=skip)
    assert detokenizer.prompt_window(prompt, skip_special_tokens=skip) == prompt
    text = detokenizer.delta(prompt, output, final=True, skip_special_tokens=skip)
    stopping = data.draw(stoppings(text))
    checker = StopChecker(
        detokenizer,
        prompt,
        StopAutomaton(stopping.stop),
        min_tokens=stopping.min_tokens,
        include_stop_str_in_output=stopping.include,
        skip_special_tokens=skip,
    )
    client_text = ""
    released = 0

    def window(end: int) -> list[int]:
        return detokenizer.next_window(prompt, output[:end], skip_special_tokens=skip)

    count = 0
    while count < len(output) and checker.match is None:
        watched = (token_flags(detokenizer).byte_sets[output[count]] & checker.watch).any()
        if watched or appends == "all":
            checker.skip(count - checker.num_tokens)
            checker.append(output[count])
        count += 1
        releasable = count - checker.num_held_tokens
        if checker.match is None:
            assert released <= releasable <= count
            take = data.draw(st.integers(released, releasable))
            client_text += detokenizer.delta(
                window(released), output[released:take], final=False, skip_special_tokens=skip
            )
            released = take
    checker.skip(count - checker.num_tokens)
    text_cut = checker.finish()
    last = detokenizer.delta(
        window(released), output[released:count], final=True, skip_special_tokens=skip
    )
    assert 0 <= text_cut <= len(last)
    client_text += last[: len(last) - text_cut]
    stop = checker.match.stop if checker.match else None
    assert Expected(count, client_text, stop) == oracle(detokenizer, prompt, output, skip, stopping)


@given(st.lists(st.text("ab", max_size=4), max_size=4), st.text("abc", max_size=20))
def test_the_automaton_agrees_with_looking_everywhere(stop: list[str], text: str) -> None:
    automaton = StopAutomaton(stop)
    state = 0
    for end, character in enumerate(text, start=1):
        state = automaton.step(state, character)
        seen = text[:end]
        found = max((word for word in stop if word and seen.endswith(word)), key=len, default=None)
        assert automaton.found[state] == found
        prefixes = {word[:length] for word in stop for length in range(len(word))}
        assert automaton.held[state] == max(
            (len(prefix) for prefix in prefixes if seen.endswith(prefix)), default=0
        )


def test_most_tokens_need_no_look_while_nothing_is_held(byte_level: Detokenizer) -> None:
    tokenizer = byte_level.tokenizer
    checker = StopChecker(byte_level, [], StopAutomaton(["stop", "你"]))

    def watched(word: str | int) -> bool:
        token_id = word if isinstance(word, int) else tokenizer.encode(word)[0]
        return bool((token_flags(byte_level).byte_sets[token_id] & checker.watch).any())

    assert not any(map(watched, ["a", "e", "<|end|>", tokenizer.vocab_size + 1]))
    assert all(map(watched, ["s", "😃"]))  # the second is part of a character
    checker.append(tokenizer.encode("s")[0])
    assert all(map(watched, ["a", "e", "<|end|>", tokenizer.vocab_size + 1]))
    checker.append(tokenizer.encode("a")[0])
    assert not watched("a")
    none = StopChecker(byte_level, [], StopAutomaton([]))
    assert not (token_flags(byte_level).byte_sets & none.watch).any()


def feed(checker: StopChecker, tokens: list[int]) -> list[int]:
    """Return how many tokens may be out after each one."""
    counts = []
    for token_id in tokens:
        checker.append(token_id)
        counts.append(checker.num_tokens - checker.num_held_tokens)
    return counts


@pytest.fixture
def letters(byte_level: Detokenizer) -> dict[str, int]:
    convert = byte_level.tokenizer.hf_tokenizer.convert_tokens_to_ids
    return {character: convert(character) for character in "abcdefstopx"}


def spell(letters: dict[str, int], text: str) -> list[int]:
    return [letters[character] for character in text]


def test_tokens_wait_while_they_may_become_a_stop_string(
    byte_level: Detokenizer, letters: dict[str, int]
) -> None:
    checker = StopChecker(byte_level, [], StopAutomaton(["stop"]))
    assert feed(checker, spell(letters, "astxa")) == [1, 1, 1, 4, 5]
    assert checker.match is None
    assert feed(checker, spell(letters, "stop")) == [5, 5, 5, 5]
    assert checker.match == StopMatch("stop", 5, 9)
    assert checker.finish() == 4


def test_held_tokens_match_begins_anew_are_released_before_it(
    byte_level: Detokenizer, letters: dict[str, int]
) -> None:
    checker = StopChecker(byte_level, [], StopAutomaton(["stop"]))
    assert feed(checker, spell(letters, "sstst")) == [0, 1, 1, 3, 3]


def test_nothing_waits_if_the_stop_string_is_kept(
    byte_level: Detokenizer, letters: dict[str, int]
) -> None:
    checker = StopChecker(byte_level, [], StopAutomaton(["stop"]), include_stop_str_in_output=True)
    assert feed(checker, spell(letters, "asto")) == [1, 2, 3, 4]
    checker.append(letters["p"])
    assert checker.match == StopMatch("stop", 1, 5)
    assert checker.finish() == 0


def test_text_behind_the_match_in_the_same_token_is_cut(byte_level: Detokenizer) -> None:
    tool_call = byte_level.tokenizer.hf_tokenizer.convert_tokens_to_ids("<tool call>")
    kept = StopChecker(byte_level, [], StopAutomaton([" "]), include_stop_str_in_output=True)
    kept.append(tool_call)
    assert kept.match == StopMatch(" ", 5, 6)
    assert kept.finish() == len("call>")
    dropped = StopChecker(byte_level, [], StopAutomaton([" "]))
    dropped.append(tool_call)
    assert dropped.finish() == len(" call>")


def test_the_match_that_ends_first_wins_then_the_longest(
    byte_level: Detokenizer, letters: dict[str, int]
) -> None:
    checker = StopChecker(byte_level, [], StopAutomaton(["abcde", "bc", "abc"]))
    feed(checker, spell(letters, "abc"))
    assert checker.match == StopMatch("abc", 0, 3)


def test_a_stop_string_before_min_tokens_does_not_count(
    byte_level: Detokenizer, letters: dict[str, int]
) -> None:
    checker = StopChecker(byte_level, [], StopAutomaton(["ab"]), min_tokens=3)
    feed(checker, spell(letters, "abx"))
    assert checker.match is None
    assert checker.num_held_tokens == 0
    feed(checker, spell(letters, "ab"))
    assert checker.match == StopMatch("ab", 3, 5)


def test_a_stop_string_completed_by_the_last_token_of_min_tokens_counts(
    byte_level: Detokenizer, letters: dict[str, int]
) -> None:
    checker = StopChecker(byte_level, [], StopAutomaton(["ab"]), min_tokens=2)
    feed(checker, spell(letters, "ab"))
    assert checker.match == StopMatch("ab", 0, 2)


def test_a_stop_string_in_text_held_back_is_found_at_the_end(byte_fallback: Detokenizer) -> None:
    tokenizer = byte_fallback.tokenizer
    checker = StopChecker(byte_fallback, tokenizer.encode("x"), StopAutomaton(["界"]))
    for token_id in tokenizer.encode("世界", add_special_tokens=False)[1:]:
        checker.append(token_id)
        assert checker.match is None
    assert checker.finish() == 1
    assert checker.match == StopMatch("界", 1, 2)


def test_half_a_surrogate_is_text_at_once(
    byte_level: Detokenizer, byte_fallback: Detokenizer
) -> None:
    for detokenizer, names in ((byte_level, "í§"), (byte_fallback, ["<0xED>", "<0xA7>"])):
        ids = detokenizer.tokenizer.hf_tokenizer.convert_tokens_to_ids([*names])
        assert detokenizer.delta([], ids, final=False) == "\N{REPLACEMENT CHARACTER}" * 2
        checker = StopChecker(detokenizer, [], StopAutomaton(["\N{REPLACEMENT CHARACTER}" * 2]))
        feed(checker, ids)
        assert checker.match == StopMatch("\N{REPLACEMENT CHARACTER}" * 2, 0, 2)


@pytest.mark.parametrize("stop", [[], [""]])
def test_without_stop_strings_nothing_is_decoded(
    byte_level: Detokenizer, monkeypatch: pytest.MonkeyPatch, stop: list[str]
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("decoded")

    monkeypatch.setattr(type(byte_level), "delta", refuse)
    monkeypatch.setattr(type(byte_level), "next_window", refuse)
    checker = StopChecker(byte_level, [5, 6], StopAutomaton(stop))
    assert feed(checker, [7, 8, 9]) == [1, 2, 3]
    assert checker.finish() == 0
    assert checker.match is None
