"""Rules for incremental decoding: which text is final, and which ids the following text needs.

Decoding is not token by token: characters are split over tokens, and the start of a text is
treated specially. There is a rule for each kind of decoder, so that `Detokenizer` is exact with a
short window of ids in place of all previous ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Protocol

from engine.text.tokenizer import Tokenizer
from engine.text.utf8 import incomplete_end, invalid_start, is_continuation, open_character

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextRule(Protocol):
    """How the decoder of a tokenizer treats the start and the end of a text."""

    def final_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of `ids` without the end that later tokens could still change."""

    def window(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """Return ids after which further tokens decode to the same text as after all of `ids`.

        They hold all text that is not final yet. They are few, however many tokens without text
        there are; only an open run of byte-fallback tokens is kept whole.
        """

    def prompt_window(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """Return the window of a prompt; at most an incomplete character is not final."""

    def open_bytes(self, window_ids: Sequence[int]) -> bytes | None:
        """Return the state for `still_open` after a window; None: decode at each token."""

    def still_open(self, open_bytes: bytes, token_id: int) -> bytes | None:
        """Return the next state if `token_id`, a visible token, makes no text final.

        None if it may make text final. In constant time: nothing is decoded.
        """


def text_rule(tokenizer: Tokenizer) -> TextRule:
    """Return the rule for the decoder of `tokenizer`."""
    steps = tokenizer.decoder_steps
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelRule(tokenizer)
    fused = False
    for step in steps:
        match step["type"]:
            case "Fuse":
                fused = True
            case "Strip" if not (fused and step["stop"]):
                pass
            case "Replace" | "ByteFallback" | "Metaspace" if not fused:
                pass
            case _:
                return UnknownRule(tokenizer)
    return TokenwiseRule(tokenizer) if steps else UnknownRule(tokenizer)


class ByteLevelRule:
    """Tokens spell bytes (GPT-2, Llama 3, Qwen); the text is all bytes, read as UTF-8.

    Invalid bytes become U+FFFD as soon as they cannot be completed any more, so that only an
    incomplete character at the very end is open: at most three bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def final_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens)
        _, tail = self._synchronise(ids, skip_special_tokens)
        return text[:-1] if incomplete_end(tail) else text  # the open bytes show as one U+FFFD

    def window(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        window, _ = self._synchronise(ids, skip_special_tokens)
        return window

    def prompt_window(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        return self.window(ids, skip_special_tokens)  # no whole character is ever open

    def open_bytes(self, window_ids: Sequence[int]) -> bytes | None:
        return None

    def still_open(self, open_bytes: bytes, token_id: int) -> bytes | None:
        return None

    def _synchronise(self, ids: Sequence[int], skip: bool) -> tuple[list[int], bytes]:
        """Go back from the end until the bytes determine the state of a UTF-8 decoder.

        A byte that is no continuation byte starts a character whatever was before it, and
        after three continuation bytes no character is open. Return the tokens and their bytes.
        """
        window: list[int] = []
        tail = b""
        for token_id in reversed(ids):
            if len(tail) >= 3 or not all(map(is_continuation, tail)):
                break
            if data := self._bytes(token_id, skip):
                window.insert(0, token_id)
                tail = data + tail
        return window, tail

    def _bytes(self, token_id: int, skip: bool) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or (skip and token_id in self._tokenizer.special_ids):
            return b""
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token with, say, a space in it is plain text
            return token.encode("utf-8")


class TokenwiseRule:
    """Each token has its own text (SentencePiece), with two exceptions.

    - The start of a text may lose its space: only until some text is there.
    - A run of byte-fallback tokens is one unit: a single wrong byte turns all of it into U+FFFD.
      A run that is a prefix of valid UTF-8 is open until another token ends it; the text of an
      invalid one is final. Skipped tokens do not end a run.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def final_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        start, run = self._last_run(ids, skip_special_tokens)
        if open_character(self._bytes(run)) is None:
            return self._tokenizer.decode(ids, skip_special_tokens)
        return self._tokenizer.decode(ids[:start], skip_special_tokens)

    def window(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        start, run = self._last_run(ids, skip_special_tokens)
        invalid = invalid_start(self._bytes(run))
        if invalid is not None:  # four bytes of the run make the rest invalid, as all do
            return run[invalid : invalid + 4]
        return [*self._context(ids, start, skip_special_tokens), *run]

    def prompt_window(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        start, run = self._last_run(ids, skip_special_tokens)
        context = self._context(ids, start, skip_special_tokens)
        tail = incomplete_end(self._bytes(run[-3:]))
        if len(tail) < len(run) and not self._tokenizer.decode(context, skip_special_tokens):
            context = self._any_text or context  # for the bytes before the tail: they are text
        return [*context, *run[len(run) - len(tail) :]]

    def open_bytes(self, window_ids: Sequence[int]) -> bytes | None:
        _, run = self._last_run(window_ids, skip=False)
        return open_character(self._bytes(run))

    def still_open(self, open_bytes: bytes, token_id: int) -> bytes | None:
        if token_id not in self._tokenizer.byte_fallback_ids:
            return None
        return open_character(open_bytes + self._bytes([token_id]))

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        tokens = map(self._tokenizer.id_to_token, token_ids)
        return bytes(int(token[1:-1], 16) for token in tokens if token is not None)  # "<0x0A>"

    @cached_property
    def _any_text(self) -> list[int]:
        """A token that has text in any context; empty if the vocabulary has none."""
        tokenizer = self._tokenizer
        tokens = (
            [token_id]
            for token_id in range(tokenizer.vocab_size)
            if token_id not in tokenizer.special_ids | tokenizer.byte_fallback_ids
            and tokenizer.decode([token_id], False).strip()
        )
        return next(tokens, [])

    def _last_run(self, ids: Sequence[int], skip: bool) -> tuple[int, list[int]]:
        """Return where the run of byte tokens at the end of `ids` starts, and its tokens."""
        start = len(ids)
        run: list[int] = []
        for index in range(len(ids) - 1, -1, -1):
            if not self._tokenizer.is_visible(ids[index], skip):
                continue
            if ids[index] not in self._tokenizer.byte_fallback_ids:
                break
            start = index
            run.append(ids[index])
        return start, run[::-1]

    def _context(self, ids: Sequence[int], end: int, skip: bool) -> list[int]:
        """Return the tokens before `end` that the decoding of later tokens depends on.

        They tell whether there is text, and that a run of bytes has ended. The last token is always
        kept. Others without text are left out, except the one that starts all text.
        """
        context: list[int] = []
        first: list[int] = []
        for index in range(end - 1, -1, -1):
            token_id = ids[index]
            if not self._tokenizer.is_visible(token_id, skip):
                continue
            if context and not self._tokenizer.token_text(token_id):
                first = [token_id]
                continue
            context.insert(0, token_id)
            first = []
            if self._tokenizer.decode(context, skip):
                break
        return first + context


class UnknownRule:
    """Any other decoder (WordPiece, CTC ...), treated as a black box.

    Holds back U+FFFD at the end, of the last tokens only, and assumes that a token's text depends
    only on the tokens of the window.
    """

    _HELD_TOKENS = 8
    _WINDOW_TOKENS = 16

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def final_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens)
        final = text.rstrip(_REPLACEMENT)
        if len(final) == len(text):
            return text
        visible = list(self._visible_from_the_end(ids, skip_special_tokens))[::-1]
        older = self._tokenizer.decode(visible[: -self._HELD_TOKENS], skip_special_tokens)
        return text[: max(len(final), len(older))]

    def window(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        visible = self._visible_from_the_end(ids, skip_special_tokens)
        window = list(islice(visible, self._WINDOW_TOKENS))[::-1]
        if not self._tokenizer.decode(window, skip_special_tokens):
            window = [*islice(filter(self._tokenizer.token_text, visible), 1), *window]
        return window

    def prompt_window(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        return self.window(ids, skip_special_tokens)

    def open_bytes(self, window_ids: Sequence[int]) -> bytes | None:
        return None

    def still_open(self, open_bytes: bytes, token_id: int) -> bytes | None:
        return None

    def _visible_from_the_end(self, ids: Sequence[int], skip: bool) -> Iterator[int]:
        return (
            token_id for token_id in reversed(ids) if self._tokenizer.is_visible(token_id, skip)
        )


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest follows at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
