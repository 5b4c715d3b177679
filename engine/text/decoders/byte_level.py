"""ByteLevelRule: tokens that spell bytes (GPT-2, Llama 3, Qwen)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from engine.text.decoders.utf8 import decode_complete, incomplete_end, is_continuation
from engine.text.stop.automaton import StopAutomaton
from engine.text.stop.search import TextSearch
from engine.text.tokenizer import Tokenizer


class ByteLevelRule:
    """The text is the bytes of all tokens, read as UTF-8.

    Invalid bytes become U+FFFD as soon as they cannot be completed any more, so that only an
    incomplete character at the very end is open: at most three bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = [cache(partial(self._bytes_of, skip=skip)) for skip in (False, True)]
        self._texts = [cache(partial(self._text_of, skip=skip)) for skip in (False, True)]

    def delta(
        self, window_ids: Sequence[int], new_ids: Sequence[int], final: bool, skip: bool
    ) -> str:
        pending = self._pending(window_ids, skip)
        data = pending + self._join(new_ids, skip)
        return data.decode("utf-8", "replace") if final else decode_complete(data)[0]

    def window(self, ids: Sequence[int], skip: bool) -> list[int]:
        """Go back from the end until the bytes determine the state of a UTF-8 decoder."""
        window: list[int] = []
        tail = b""
        for token_id in reversed(ids):
            if _is_synchronised(tail):
                break
            if data := self._bytes[skip](token_id):
                window.append(token_id)
                tail = data + tail
        return window[::-1]

    def prompt_window(self, ids: Sequence[int], skip: bool) -> list[int]:
        return self.window(ids, skip)  # no whole character is ever open

    def opens(self, token_id: int, skip: bool) -> bool:
        return _is_synchronised(self._bytes[skip](token_id))

    def whole_text(self, token_id: int) -> bytes | None:
        return None if self._texts[False](token_id) is None else self._bytes[False](token_id)

    def raw_bytes(self, token_id: int) -> bytes | None:
        return self._bytes[False](token_id)

    def scanner(
        self, automaton: StopAutomaton, window_ids: Sequence[int], skip: bool
    ) -> _ByteLevelScanner:
        pending = self._pending(window_ids, skip)
        return _ByteLevelScanner(automaton, self._bytes[skip], self._texts[skip], pending)

    def _pending(self, window_ids: Sequence[int], skip: bool) -> bytes:
        """Return the bytes of the incomplete character at the end of a window."""
        return incomplete_end(self._join(window_ids, skip)[-3:])

    def _join(self, ids: Sequence[int], skip: bool) -> bytes:
        return b"".join(map(self._bytes[skip], ids))

    def _bytes_of(self, token_id: int, skip: bool) -> bytes:
        if skip:
            return b"" if token_id in self._tokenizer.special_ids else self._bytes[False](token_id)
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token with, for example, a space in it is plain text
            return token.encode("utf-8")

    def _text_of(self, token_id: int, skip: bool) -> str | None:
        """Return the text of a token of whole characters, None of any other."""
        try:
            return self._bytes[skip](token_id).decode("utf-8")
        except UnicodeDecodeError:
            return None


class _ByteLevelScanner:
    def __init__(
        self,
        automaton: StopAutomaton,
        bytes_of: Callable[[int], bytes],
        text_of: Callable[[int], str | None],
        pending: bytes,
    ) -> None:
        self.search = TextSearch(automaton, prompt_text=pending.decode("utf-8", "replace"))
        self._bytes = bytes_of
        self._texts = text_of
        self._pending = pending

    @property
    def is_open(self) -> bool:
        return bool(self._pending)

    def append(self, token_id: int) -> None:
        text = None if self._pending else self._texts(token_id)
        if text is None:
            text, self._pending = decode_complete(self._pending + self._bytes(token_id))
        self.search.feed(text)

    def finish(self) -> None:
        self.search.feed(self._pending.decode("utf-8", "replace"))
        self._pending = b""


def _is_synchronised(tail: bytes) -> bool:
    """Whether `tail` determines the state of a UTF-8 decoder, whatever was before it.

    A byte that is no continuation byte starts a character, and after three continuation bytes no
    character is open.
    """
    return len(tail) >= 3 or not all(map(is_continuation, tail))


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest follows at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
