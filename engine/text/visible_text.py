"""Which part of a decoded text is final, and how little context decides what follows.

Decoding is not token by token: characters are split over tokens, and the start of a text is
treated specially. Each rule here knows one kind of decoder and answers two questions about it,
so that `Detokenizer` can be exact on a short window of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from engine.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextRule(Protocol):
    """What the decoder of a tokenizer does to the ends of a text."""

    def final_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of `ids` without the end that later tokens could still change."""

    def window_start(self, ids: Sequence[int], end: int, skip_special_tokens: bool) -> int:
        """Return a start such that `ids[start:end]` decides the text after it as `ids[:end]` does.

        The window holds all text before `end` that is not final yet.
        """

    def closed(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """Return `ids`, a window of visible tokens, such that no later one changes their text.

        Only an incomplete character at the end stays open.
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

    What is invalid becomes U+FFFD as soon as it cannot be completed any more, so that only an
    incomplete character at the very end is open: at most three bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def final_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens)
        _, tail = self._synchronise(ids, len(ids), skip_special_tokens)
        return text[:-1] if _is_incomplete(tail) else text  # the open bytes show as one U+FFFD

    def window_start(self, ids: Sequence[int], end: int, skip_special_tokens: bool) -> int:
        start, _ = self._synchronise(ids, end, skip_special_tokens)
        return start

    def closed(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        return list(ids)  # no whole character is ever open

    def _synchronise(self, ids: Sequence[int], end: int, skip: bool) -> tuple[int, bytes]:
        """Go back from `end` until the bytes passed tell the state of a UTF-8 reader.

        A byte that is no continuation byte starts a character whatever was before it, and
        after three continuation bytes no character is open.
        """
        tail = b""
        start = end
        while start > 0 and len(tail) < 3 and all(map(_is_continuation, tail)):
            start -= 1
            tail = self._bytes(ids[start], skip) + tail
        return start, tail

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

    - The start of a text may lose its space: once some text is there, that is over.
    - A run of byte-fallback tokens is one unit: a single wrong byte turns all of it into U+FFFD,
      so that the run stays open until another token ends it. Skipped tokens do not end it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def final_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        run = self._open_run(ids, len(ids), skip_special_tokens)
        return self._tokenizer.decode(ids[:run], skip_special_tokens)

    def window_start(self, ids: Sequence[int], end: int, skip_special_tokens: bool) -> int:
        start = run = self._open_run(ids, end, skip_special_tokens)
        while start > 0:
            start -= 1
            if not self._tokenizer.is_visible(ids[start], skip_special_tokens):
                continue
            if self._tokenizer.decode(ids[start:run], skip_special_tokens):
                break
        return start

    def closed(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        start = self._open_run(ids, len(ids), skip_special_tokens)
        before, run = list(ids[:start]), list(ids[start:])
        if not run:
            return before
        tail = _incomplete_end(bytes(map(self._byte, run[-3:])))
        if len(tail) < len(run) and not self._tokenizer.decode(before, skip_special_tokens):
            before = [self._any_text]  # for what was before the tail: a text has begun
        return [*before, *run[len(run) - len(tail) :]]

    def _byte(self, token_id: int) -> int:
        token = self._tokenizer.id_to_token(token_id)
        assert token is not None
        return int(token[1:-1], 16)  # "<0x0A>"

    @cached_property
    def _any_text(self) -> int:
        """A token that is text wherever it stands."""
        tokenizer = self._tokenizer
        return next(
            token_id
            for token_id in range(tokenizer.vocab_size)
            if token_id not in tokenizer.special_ids | tokenizer.byte_fallback_ids
            and tokenizer.decode([token_id], False).strip()
        )

    def _open_run(self, ids: Sequence[int], end: int, skip: bool) -> int:
        """Return where the run of byte tokens that reaches `end` starts; `end` if there is none."""
        run = end
        for index in range(end - 1, -1, -1):
            if ids[index] in self._tokenizer.byte_fallback_ids:
                if self._tokenizer.is_visible(ids[index], skip):
                    run = index
            elif self._tokenizer.is_visible(ids[index], skip):
                break
        return run


class UnknownRule:
    """Any other decoder (WordPiece, CTC ...): holds back U+FFFD at the end, keeps a long window."""

    _VISIBLE_TOKENS = 8

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def final_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens).rstrip(_REPLACEMENT)

    def window_start(self, ids: Sequence[int], end: int, skip_special_tokens: bool) -> int:
        start = end
        visible = 0
        while start > 0:
            start -= 1
            if not self._tokenizer.is_visible(ids[start], skip_special_tokens):
                continue
            visible += 1
            enough = visible >= self._VISIBLE_TOKENS
            if enough and self.final_text(ids[start:end], skip_special_tokens):
                break
        return start

    def closed(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        return list(ids)


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest follows at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _is_incomplete(tail: bytes) -> bool:
    """Whether UTF-8 text that ends in `tail` ends inside a character that may still complete."""
    return bool(_incomplete_end(tail))


def _incomplete_end(tail: bytes) -> bytes:
    """Return the bytes of the character that is open at the end of UTF-8 text; empty if none is."""
    for length in range(1, min(3, len(tail)) + 1):
        if not _is_continuation(tail[-length]):
            try:
                tail[-length:].decode("utf-8")
            except UnicodeDecodeError as error:
                return tail[-length:] if error.reason == "unexpected end of data" else b""
            break
    return b""
