"""The beginning of UTF-8 text, against trying out what may follow."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from engine.text.decoders.utf8 import decode_complete, incomplete_end, invalid_start, open_character

almost_text = st.lists(
    st.binary(max_size=3) | st.sampled_from([*"aé你🦊\ud7ff\U0010ffff"]).map(str.encode), max_size=6
).map(b"".join) | st.builds(lambda text, cut: text.encode()[:cut], st.text(), st.integers(0, 40))


# The first and last second bytes after each kind of first byte, and so of all third ones.
_CONTINUATIONS = (0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF)


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def reference(data: bytes) -> bytes | None:
    """Return the bytes that wait for others to become text; None if none can make `data` text."""
    for length in range(4):
        start, tail = data[: len(data) - length], data[len(data) - length :]
        if len(tail) == length and is_text(start):
            completions = itertools.product(_CONTINUATIONS, repeat=length and 4 - length)
            more = (bytes(each[:end]) for each in completions for end in range(4))
            if any(is_text(tail + each) for each in more):
                return tail
    return None


@given(almost_text)
@example(b"\xed\xa7")  # half of a surrogate, which Python's incremental decoder waits for
def test_what_is_open_is_what_more_bytes_make_text(data: bytes) -> None:
    assert open_character(data) == reference(data)
    assert (invalid_start(data) is None) == (reference(data) is not None)


@given(almost_text)
def test_byte_by_byte_it_is_the_same(data: bytes) -> None:
    state: bytes | None = b""
    for byte in data:
        if state is not None:
            state = open_character(state + bytes([byte]))
    assert state == open_character(data)


@given(almost_text)
def test_four_bytes_from_the_error_on_are_no_text_whatever_follows(data: bytes) -> None:
    start = invalid_start(data)
    if start is not None:
        assert reference(data[:start]) == b""
        assert open_character(data[start : start + 4]) is None


@given(almost_text, almost_text)
def test_the_incomplete_end_is_seen_in_the_last_three_bytes(before: bytes, data: bytes) -> None:
    open_bytes = reference(data)
    if open_bytes is not None:
        assert incomplete_end((before + data)[-3:]) == incomplete_end(data) or not data
        assert incomplete_end(data) == open_bytes


@given(almost_text)
def test_a_decoded_start_and_its_rest_are_the_whole(data: bytes) -> None:
    text, rest = decode_complete(data)
    assert text + rest.decode(errors="replace") == data.decode(errors="replace")
    assert rest == incomplete_end(data)
