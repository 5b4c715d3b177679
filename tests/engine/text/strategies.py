"""Random token sequences that break naive detokenizers, and random ways to cut them up."""

from typing import NamedTuple

from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from engine.text.detokenizer import Detokenizer

# Characters of one to four bytes; literal U+FFFD, which is text like any other.
_HARD_TEXTS = (
    "你好",
    "😀",
    "é ",
    "👩‍👩‍👧",
    " the",
    "  ",
    "\N{REPLACEMENT CHARACTER}",
    "stop",
    "日本 ",
)


class Sequences(NamedTuple):
    """A prompt, its output and whether special tokens are skipped."""

    prompt: list[int]
    output: list[int]
    skip_special_tokens: bool


def _spelled_out(detokenizer: Detokenizer, text: str) -> list[int]:
    """Return one byte-level token per byte of `text`, as if nothing had been merged."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(spelling, _)] = alphabet.pre_tokenize_str(text)
    return [detokenizer.tokenizer.hf_tokenizer.convert_tokens_to_ids(char) for char in spelling]


@st.composite
def token_ids(draw: st.DrawFn, detokenizer: Detokenizer, max_pieces: int = 12) -> list[int]:
    """Draw ids: any at all, specials, texts of split characters, and what is left of cut ones."""
    tokenizer = detokenizer.tokenizer
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in _HARD_TEXTS]
    if tokenizer.decoder_steps[0]["type"] == "ByteLevel":
        texts += [_spelled_out(detokenizer, text) for text in _HARD_TEXTS]
    any_id = st.integers(
        0, tokenizer.vocab_size + 2
    )  # a model may know more ids than its tokenizer
    special = st.sampled_from(sorted(tokenizer.special_ids))
    parts = [
        any_id.map(lambda token_id: [token_id]),
        special.map(lambda token_id: [token_id]),
        st.sampled_from([ids for ids in texts if ids]),
        st.sampled_from([ids[:-1] for ids in texts if len(ids) > 1] or [[0]]),
    ]
    if tokenizer.byte_fallback_ids:
        byte = st.sampled_from(sorted(tokenizer.byte_fallback_ids))
        parts.append(byte.map(lambda token_id: [token_id]))
    pieces = draw(st.lists(st.one_of(parts), max_size=max_pieces))
    return [token_id for piece in pieces for token_id in piece]


@st.composite
def sequences(draw: st.DrawFn, detokenizer: Detokenizer) -> Sequences:
    """Draw a prompt (often none, or one that ends inside a character) and an output."""
    prompt = draw(st.just([]) | token_ids(detokenizer, max_pieces=5))
    return Sequences(prompt, draw(token_ids(detokenizer)), draw(st.booleans()))


@st.composite
def chunkings(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    """Cut `ids` into chunks, some of them empty."""
    borders = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 2)))
    return [ids[begin:end] for begin, end in zip([0, *borders], [*borders, len(ids)], strict=True)]
