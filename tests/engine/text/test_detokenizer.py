"""The pieces of text of any chunking join to the full decode."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from tests.engine.text.conftest import token_flags
from tests.engine.text.strategies import chunkings, sequences, token_ids

# Each of six tokenizers takes so many.
_FEWER = settings(max_examples=settings.default.max_examples // 2)  # type: ignore[union-attr]


def stream(
    detokenizer: Detokenizer, prompt: list[int], chunks: list[list[int]], *, skip: bool
) -> str:
    """Decode as the server does: each chunk with a window of its own and nothing else."""
    window = detokenizer.prompt_window(prompt, skip_special_tokens=skip)
    text = ""
    for number, chunk in enumerate(chunks, start=1):
        text += detokenizer.delta(
            window, chunk, final=number == len(chunks), skip_special_tokens=skip
        )
        window = detokenizer.next_window(window, chunk, skip_special_tokens=skip)
    return text


class IncrementalDecoder:
    """Decodes a growing sequence token by token, each in a chunk of its own."""

    def __init__(self, detokenizer: Detokenizer, prompt: list[int], *, skip: bool = True) -> None:
        self._detokenizer = detokenizer
        self._skip = skip
        self._window = detokenizer.prompt_window(prompt, skip_special_tokens=skip)

    def append(self, token_id: int) -> str:
        """Return the text that the token makes final."""
        window, new, skip = self._window, [token_id], self._skip
        self._window = self._detokenizer.next_window(window, new, skip_special_tokens=skip)
        return self._detokenizer.delta(window, new, final=False, skip_special_tokens=skip)

    def held_text(self) -> str:
        return self._detokenizer.delta(self._window, [], final=True, skip_special_tokens=self._skip)


def append(decoder: IncrementalDecoder, token_ids: list[int]) -> str:
    return "".join(decoder.append(token_id) for token_id in token_ids)


@_FEWER
@given(data=st.data())
def test_any_chunking_joins_to_the_one_shot_text(
    detokenizer: Detokenizer, data: st.DataObject
) -> None:
    prompt, output, skip = data.draw(sequences(detokenizer))
    chunks = data.draw(chunkings(output))
    window = detokenizer.prompt_window(prompt, skip_special_tokens=skip)
    whole = detokenizer.delta(window, output, final=True, skip_special_tokens=skip)
    assert stream(detokenizer, prompt, chunks, skip=skip) == whole


@_FEWER
@given(data=st.data())
def test_without_a_prompt_the_text_is_the_full_decode(
    detokenizer: Detokenizer, data: st.DataObject
) -> None:
    _, output, skip = data.draw(sequences(detokenizer))
    chunks = data.draw(chunkings(output))
    whole = detokenizer.tokenizer.decode(output, skip)
    assert stream(detokenizer, [], chunks, skip=skip) == whole


@_FEWER
@given(data=st.data())
def test_the_text_after_a_prompt_is_what_the_full_decode_adds(
    byte_level: Detokenizer, data: st.DataObject
) -> None:
    prompt, output, skip = data.draw(sequences(byte_level))
    tokenizer = byte_level.tokenizer
    both = tokenizer.decode(prompt + output, skip)
    held = tokenizer.decode(prompt, skip).removesuffix(
        byte_level.delta(prompt, [], final=True, skip_special_tokens=skip)
    )
    delta = byte_level.delta(prompt, output, final=True, skip_special_tokens=skip)
    assert held + delta == both


@_FEWER
@given(data=st.data())
def test_the_incremental_decoder_gives_the_same_text(
    detokenizer: Detokenizer, data: st.DataObject
) -> None:
    prompt, output, skip = data.draw(sequences(detokenizer))
    decoder = IncrementalDecoder(detokenizer, prompt, skip=skip)
    pieces = [decoder.append(token_id) for token_id in output]
    pieces.append(decoder.held_text())
    window = detokenizer.prompt_window(prompt, skip_special_tokens=skip)
    whole = detokenizer.delta(window, output, final=True, skip_special_tokens=skip)
    assert "".join(pieces) == whole


@pytest.mark.parametrize("skip", [False, True])
@_FEWER
@given(data=st.data())
def test_a_token_that_opens_a_window_is_the_window_of_what_follows(
    detokenizer: Detokenizer, skip: bool, data: st.DataObject
) -> None:
    flags = token_flags(detokenizer)
    openers = np.flatnonzero(flags.opens_window[int(skip)]).tolist()
    if not openers:
        assert any(step["type"] == "WordPiece" for step in detokenizer.tokenizer.decoder_steps)
        return
    opener = data.draw(st.sampled_from(openers))
    before, after = data.draw(token_ids(detokenizer, 4)), data.draw(token_ids(detokenizer, 4))
    assert detokenizer.next_window(before, [opener], skip_special_tokens=skip) == [opener]
    decode = partial(detokenizer.delta, skip_special_tokens=skip)
    parts = decode([], [*before, opener], final=False) + decode([opener], after, final=True)
    assert parts == detokenizer.tokenizer.decode([*before, opener, *after], skip)


def test_nearly_all_tokens_open_a_window(
    byte_level: Detokenizer, byte_fallback: Detokenizer
) -> None:
    for detokenizer in (byte_level, byte_fallback):
        tokenizer = detokenizer.tokenizer
        flags = token_flags(detokenizer)
        assert flags.opens_window.shape == (2, tokenizer.vocab_size + 3)
        assert not flags.opens_window[1, [*tokenizer.special_ids]].any()
        assert flags.opens_window[0, [*tokenizer.special_ids]].all()
        text = tokenizer.encode("The quick brown fox; stop here.")
        of_text = [i for i in text if i not in tokenizer.byte_fallback_ids]
        of_text = [i for i in of_text if tokenizer.token_text(i).strip()]
        assert flags.opens_window[0, of_text].all()


@_FEWER
@given(data=st.data())
def test_text_once_given_is_never_taken_back(detokenizer: Detokenizer, data: st.DataObject) -> None:
    ids = data.draw(token_ids(detokenizer))
    more = data.draw(token_ids(detokenizer))
    given_text = detokenizer.delta([], ids, final=False, skip_special_tokens=False)
    assert detokenizer.tokenizer.decode(ids + more, False).startswith(given_text)


@given(data=st.data())
def test_byte_level_text_is_held_only_while_it_can_still_change(
    byte_level: Detokenizer, data: st.DataObject
) -> None:
    ids = data.draw(token_ids(byte_level))
    held = byte_level.delta(ids, [], final=True, skip_special_tokens=False)
    if held:
        tokenizer = byte_level.tokenizer
        before = tokenizer.decode(ids, False).removesuffix(held)
        # Bytes 0x80 and 0xA2: one of them continues any character.
        continuations = tokenizer.hf_tokenizer.convert_tokens_to_ids(["Ģ", "¢"])
        longer = [
            tokenizer.decode([*ids, *[continuation] * more], False).removeprefix(before)
            for continuation in continuations
            for more in (1, 2, 3)
        ]
        assert held == "\N{REPLACEMENT CHARACTER}"
        assert any(not text.startswith(held) for text in longer)


def test_a_literal_replacement_character_goes_out_at_once(detokenizer: Detokenizer) -> None:
    """In a byte-level vocabulary its name is that of an added token: plain text."""
    tokenizer = detokenizer.tokenizer
    literal = tokenizer.hf_tokenizer.convert_tokens_to_ids("\N{REPLACEMENT CHARACTER}")
    assert literal not in tokenizer.special_ids
    text = detokenizer.delta([], [literal] * 3, final=False)
    if any(step["type"] == "WordPiece" for step in tokenizer.decoder_steps):
        # Of a decoder that no rule knows, the character itself is all there is to judge by.
        assert not text.endswith("\N{REPLACEMENT CHARACTER}")
    else:
        assert text == "\N{REPLACEMENT CHARACTER}" * 3


def test_an_emoji_comes_when_it_is_complete(byte_level: Detokenizer) -> None:
    ids = byte_level.tokenizer.encode("😃")
    assert len(ids) > 1
    decoder = IncrementalDecoder(byte_level, [])
    assert [decoder.append(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["😃"]
    assert decoder.held_text() == ""


def test_an_incomplete_character_comes_as_replacement_at_the_end(byte_level: Detokenizer) -> None:
    ids = byte_level.tokenizer.encode("😃")[:-1]
    decoder = IncrementalDecoder(byte_level, [])
    assert append(decoder, ids) == ""
    assert decoder.held_text() == "\N{REPLACEMENT CHARACTER}"


def test_a_prompt_that_ends_inside_a_character_is_completed(byte_level: Detokenizer) -> None:
    ids = byte_level.tokenizer.encode("😃")
    assert byte_level.delta(ids[:-1], ids[-1:], final=False) == "😃"


def test_a_run_of_fallback_bytes_waits_for_its_end(byte_fallback: Detokenizer) -> None:
    tokenizer = byte_fallback.tokenizer
    world, plain = tokenizer.encode("世界", add_special_tokens=False)[1:], tokenizer.encode("a")[-1]
    assert len(world) == 6
    decoder = IncrementalDecoder(byte_fallback, tokenizer.encode("x"))
    assert append(decoder, world) == ""
    assert append(decoder, [plain]) == "世界a"


def test_one_wrong_byte_spoils_its_whole_run(byte_fallback: Detokenizer) -> None:
    tokenizer = byte_fallback.tokenizer
    world = tokenizer.encode("世", add_special_tokens=False)[1:]
    ids = [*world, *world[:1]]
    decoder = IncrementalDecoder(byte_fallback, [])
    assert append(decoder, ids) == ""
    assert decoder.held_text() == tokenizer.decode(ids) == "\N{REPLACEMENT CHARACTER}" * 4


def test_the_window_spans_skipped_tokens_inside_a_run(byte_fallback: Detokenizer) -> None:
    tokenizer = byte_fallback.tokenizer
    first, *rest = tokenizer.encode("世", add_special_tokens=False)[1:]
    plain = tokenizer.encode("a")[-1]
    ids = [plain, plain, first, 2, 2, *rest]
    window = byte_fallback.next_window([], ids, skip_special_tokens=True)
    assert window == [plain, first, *rest]
    assert byte_fallback.next_window([], ids, skip_special_tokens=False) == rest[:4]


def test_the_window_of_a_long_text_is_short(detokenizer: Detokenizer) -> None:
    tokenizer = detokenizer.tokenizer
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.byte_fallback_ids] * 30
    ids = [token_id for token_id in ids if tokenizer.token_text(token_id).strip()]
    assert len(ids) > 100
    assert len(detokenizer.next_window([], ids)) <= 16


def test_leading_space_of_a_later_chunk_survives(byte_fallback: Detokenizer) -> None:
    """The decoder strips the space that starts a text, not one that starts a chunk."""
    tokenizer = byte_fallback.tokenizer
    the = tokenizer.hf_tokenizer.convert_tokens_to_ids("▁the")
    assert stream(byte_fallback, [], [[the], [], [the], [1, the]], skip=True) == "the the the"


@pytest.mark.parametrize("prompt", [[], [1], [1, 2, 1]])
def test_space_is_stripped_if_only_skipped_tokens_came_before(
    byte_fallback: Detokenizer, prompt: list[int]
) -> None:
    the = byte_fallback.tokenizer.hf_tokenizer.convert_tokens_to_ids("▁the")
    assert stream(byte_fallback, prompt, [[1], [the], [the]], skip=True) == "the the"


def test_of_a_run_that_ends_a_prompt_only_an_incomplete_character_is_open(
    byte_fallback: Detokenizer,
) -> None:
    tokenizer = byte_fallback.tokenizer
    emoji = tokenizer.encode("🦊", add_special_tokens=False)[-4:]
    assert set(emoji) <= tokenizer.byte_fallback_ids
    text = tokenizer.encode("a", add_special_tokens=False)
    for before in (text, []):
        prompt = before + emoji * 1000
        for cut in range(4):  # the prompt may end inside a character
            ids, rest = prompt[: len(prompt) - cut], emoji[4 - cut :]
            assert len(byte_fallback.prompt_window(ids)) <= 4
            decoder = IncrementalDecoder(byte_fallback, ids)
            pieces = append(decoder, [*rest, *emoji, *text]) + decoder.held_text()
            assert pieces == "🦊" * (1 + bool(cut)) + tokenizer.decode([*emoji, *text])[1:]


@given(prompt=st.text(min_size=1), output=st.text())
def test_after_a_prompt_of_whole_text_comes_what_the_full_decode_adds(
    byte_fallback: Detokenizer, prompt: str, output: str
) -> None:
    tokenizer = byte_fallback.tokenizer
    ids, more = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, output))
    before, both = tokenizer.decode(ids), tokenizer.decode(ids + more)
    if before:
        decoder = IncrementalDecoder(byte_fallback, ids)
        assert append(decoder, more) + decoder.held_text() == both[len(before) :]
