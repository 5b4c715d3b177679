"""The prefix tree against a plain list of what was sent."""

from hypothesis import given
from hypothesis import strategies as st

from client.gateway.routing.prefixes import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    PrefixTree,
    block_hashes,
    prompt_bytes,
)

# Prompts that begin alike: sequences over a few blocks.
SEQUENCES = st.lists(st.sampled_from("abc"), max_size=8)


def _hashes(sequence: list[str], salt: str = "") -> list[int]:
    return block_hashes("".join(each * BLOCK_BYTES for each in sequence).encode(), salt)


@given(st.lists(SEQUENCES, max_size=20), SEQUENCES, st.integers(1, 12))
def test_what_is_left_are_prefixes_within_the_bound(
    sent: list[list[str]], asked: list[str], capacity: int
) -> None:
    tree = PrefixTree(capacity)
    for sequence in sent:
        tree.add(_hashes(sequence))
        assert len(tree) <= capacity
        assert tree.match(_hashes(sequence)) == min(len(sequence), capacity)
    hashes = _hashes(asked)
    known = [tree.match(hashes[: i + 1]) for i in range(len(hashes))]
    length = tree.match(hashes)
    # A prompt's blocks are known up to one place and unknown behind it, in every prefix of it.
    assert known == [min(i + 1, length) for i in range(len(hashes))]


@given(st.lists(SEQUENCES, max_size=20), SEQUENCES)
def test_the_match_is_the_longest_common_prefix(sent: list[list[str]], asked: list[str]) -> None:
    tree = PrefixTree(1000)
    for sequence in sent:
        tree.add(_hashes(sequence))
    longest = max((_common(sequence, asked) for sequence in sent), default=0)
    assert tree.match(_hashes(asked)) == longest


def _common(first: list[str], second: list[str]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def test_the_least_recently_used_prompt_is_forgotten_first() -> None:
    tree = PrefixTree(6)
    for sequence in ("aaa", "bbb", "aaa", "cc"):
        tree.add(_hashes(list(sequence)))
    assert [tree.match(_hashes(list(each))) for each in ("aaa", "bbb", "cc")] == [3, 1, 2]


def test_salts_have_nothing_in_common() -> None:
    assert not set(_hashes(["a", "b"], "one")) & set(_hashes(["a", "b"], "two"))


def test_blocks_are_full_and_bounded_in_number() -> None:
    assert block_hashes(b"a" * (BLOCK_BYTES - 1)) == []
    assert len(block_hashes(b"a" * (MAX_BLOCKS + 5) * BLOCK_BYTES)) == MAX_BLOCKS


@given(st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}), min_size=1))
def test_a_conversation_that_goes_on_keeps_its_beginning(messages: list[dict[str, str]]) -> None:
    tools = {"tools": [{"type": "function"}]}
    earlier = prompt_bytes(None, messages[:-1], tools)
    later = prompt_bytes(None, messages, tools)
    assert later.startswith(earlier)


def test_what_cannot_be_sent_has_no_bytes() -> None:
    assert prompt_bytes([2**40], None, None) == b""
    assert prompt_bytes(None, [{"content": object()}], None) == b""
    assert prompt_bytes(None, [{"content": "\ud800"}], None) == b""
    assert prompt_bytes("\ud800", None, None) == b"?"


def test_no_more_of_a_prompt_is_encoded_than_decides() -> None:
    most = MAX_BLOCKS * BLOCK_BYTES
    assert len(prompt_bytes("a" * 2 * most, None, None)) == most
    assert len(prompt_bytes([1] * most, None, None)) == most
    message = {"role": "user", "content": "a" * 1000}
    few, many = (prompt_bytes(None, [message] * n, None) for n in (most // 1000, most))
    assert most <= len(many) <= most + 2000
    assert many.startswith(few[:most])
