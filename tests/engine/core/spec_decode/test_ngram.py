"""What followed the last tokens where they came before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.spec_decode.proposer import followers


def found(text: str, num_tokens: int = 4, least: int = 2, most: int = 4) -> str:
    token_ids = np.frombuffer(text.encode("ascii"), dtype=np.uint8).astype(np.int32)
    guesses = followers(token_ids, num_tokens, least=least, most=most)
    assert guesses.dtype == np.int32
    return "".join(map(chr, guesses.tolist()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat sat. the c", "at s"),
        ("xabc yabd ab", "d ab"),  # where it came last
        ("abcX bcY abc", "X bc"),  # but a longer one first
        ("12345-45", "-45-"),  # it reaches the end, and goes on as if that had been there before
        ("aaa", "aaaa"),
        ("ababab", "abab"),
        ("abcdef", ""),
        ("a b", ""),  # one token is too few
        ("ab", ""),
        ("a", ""),
    ],
)
def test_finds_the_longest_end_where_it_came_last(text: str, expected: str) -> None:
    assert found(text) == expected


def test_lengths_are_limited() -> None:
    assert found("xyz1 yz2 xyz", most=2) == "2 xy"
    assert found("xyz1 yz2 xyz", most=3) == "1 yz"
    assert found("xyz1 yz2 xyz", least=4) == ""
    assert found("a1 a", least=1) == "1 a1"
    assert found("the cat sat. the c", num_tokens=1) == "a"


@given(
    text=st.text("abc", min_size=1, max_size=40),
    num_tokens=st.integers(1, 12),
    least=st.integers(1, 4),
    more=st.integers(0, 3),
)
def test_all_of_it_is_what_a_search_finds(
    text: str, num_tokens: int, least: int, more: int
) -> None:
    most = least + more
    expected = ""
    for length in range(min(most, len(text) - 1), least - 1, -1):
        start = text.rfind(text[-length:], 0, len(text) - 1)
        if start >= 0:
            repeated = text[start + length :]
            while len(repeated) < num_tokens:
                repeated += repeated
            # It repeats what is between the two, also where they overlap.
            expected = repeated[:num_tokens]
            break
    assert found(text, num_tokens, least, most) == expected
