"""The beginning of UTF-8 text, against Python's own incremental decoder."""

import codecs

from hypothesis import given
from hypothesis import strategies as st

from engine.text.utf8 import incomplete_end, invalid_start, open_character

almost_text = st.lists(
    st.binary(max_size=3) | st.sampled_from([*"aé你🦊\ud7ff\U0010ffff"]).map(str.encode), max_size=6
).map(b"".join) | st.builds(lambda text, cut: text.encode()[:cut], st.text(), st.integers(0, 40))


def reference(data: bytes) -> bytes | None:
    """Return what a strict decoder has not turned into text yet; None if it refuses `data`."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(data)
    except UnicodeDecodeError:
        return None
    return decoder.getstate()[0]


@given(almost_text)
def test_what_is_open_is_what_a_strict_decoder_waits_with(data: bytes) -> None:
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
