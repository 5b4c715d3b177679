"""TokenwiseRule: tokens with a text each, and runs of byte-fallback tokens (SentencePiece)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial

from engine.text.decoders.utf8 import incomplete_end, invalid_start, open_character
from engine.text.stop.automaton import StopAutomaton
from engine.text.stop.search import TextSearch
from engine.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenwiseRule:
    """Each token has its own text, with two exceptions.

    - The start of a text may lose its spaces: only until some text is there.
    - A run of byte-fallback tokens is one unit: a single wrong byte turns each of them into
      U+FFFD. A run that is a prefix of valid UTF-8 is open until another token ends it; the text
      of an invalid one is final. Skipped tokens do not end a run.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._strips = [
            (step["content"], step["start"])
            for step in tokenizer.decoder_steps
            if step["type"] == "Strip"
        ]
        tokens = {i: tokenizer.id_to_token(i) for i in tokenizer.byte_fallback_ids}
        bytes_ = {i: int(token[3:-1], 16) for i, token in tokens.items() if token}  # "<0x0A>"
        shown = {i: byte for i, byte in bytes_.items() if i not in tokenizer.special_ids}
        self._byte_of = [bytes_, shown]  # indexed by skip, like the other tables
        self._texts = [cache(partial(self._text_of, skip=skip)) for skip in (False, True)]
        # Metaspace treats the first of all tokens differently, whether it has text or not.
        self._first_texts = self._texts
        if tokenizer.decoder_steps[0]["type"] == "Metaspace":
            first = self._first_text_of
            self._first_texts = [cache(partial(first, skip=skip)) for skip in (False, True)]

    def delta(
        self, window_ids: Sequence[int], new_ids: Sequence[int], final: bool, skip: bool
    ) -> str:
        if window_ids and self.opens(window_ids[-1], skip):
            return self._join(self._texts[skip], new_ids, final, skip)
        before = self._decode(window_ids, skip, final=False)
        return self._decode([*window_ids, *new_ids], skip, final=final)[len(before) :]

    def window(self, ids: Sequence[int], skip: bool) -> list[int]:
        start, run = self._last_run(ids, skip)
        invalid = invalid_start(self._run_bytes(run))
        if invalid is not None:  # four bytes of the run make the rest invalid, as all do
            return run[invalid : invalid + 4]
        return [*self._context(ids, start, skip), *run]

    def prompt_window(self, ids: Sequence[int], skip: bool) -> list[int]:
        start, run = self._last_run(ids, skip)
        context = self._context(ids, start, skip)
        tail = incomplete_end(self._run_bytes(run[-3:]))
        if len(tail) < len(run) and not self._decode(context, skip):
            context = self._any_text or context  # for the bytes before the tail: they are text
        return [*context, *run[len(run) - len(tail) :]]

    def opens(self, token_id: int, skip: bool) -> bool:
        text = self._first_texts[skip](token_id)
        return text is not None and self._strip(text) != ""

    def whole_text(self, token_id: int) -> bytes | None:
        text = self._texts[False](token_id)
        if text is not None:
            return text.encode("utf-8")
        return None if token_id in self._byte_of[False] else b""

    def raw_bytes(self, token_id: int) -> bytes | None:
        byte = self._byte_of[False].get(token_id)
        return self.whole_text(token_id) if byte is None else bytes([byte])

    def scanner(
        self, automaton: StopAutomaton, window_ids: Sequence[int], skip: bool
    ) -> _TokenwiseScanner:
        start, run = self._last_run(window_ids, skip)
        context = window_ids[:start]
        search = TextSearch(
            automaton,
            prompt_text=self.delta(window_ids, [], True, skip),
            raw=self._join(self._first_texts[skip], context, True, skip),
            strip=None if self._decode(context, skip) else self._strip,
        )
        is_first = not any(self._tokenizer.is_visible(token_id, skip) for token_id in window_ids)
        first_texts = self._first_texts[skip] if is_first else self._texts[skip]
        scanner = _TokenwiseScanner(search, self._texts[skip], first_texts, self._byte_of[skip])
        for token_id in run:
            scanner.append(token_id)
        return scanner

    def _decode(self, ids: Sequence[int], skip: bool, *, final: bool = True) -> str:
        """Return the text of all of `ids`; unless `final`, without an open run at the end."""
        return self._strip(self._join(self._first_texts[skip], ids, final, skip))

    def _join(
        self, first_texts: Callable[[int], str | None], ids: Sequence[int], final: bool, skip: bool
    ) -> str:
        """Return the text of `ids` with nothing stripped; the first is looked up separately."""
        texts, byte_of = first_texts, self._byte_of[skip]
        pieces: list[str] = []
        run = bytearray()
        for token_id in ids:
            text = texts(token_id)
            if text is not None:
                if run:
                    pieces.append(_run_text(run))
                    run.clear()
                pieces.append(text)
                texts = self._texts[skip]
            elif token_id in byte_of:
                run.append(byte_of[token_id])
        if run and (final or invalid_start(run) is not None):
            pieces.append(_run_text(run))
        return "".join(pieces)

    def _strip(self, text: str) -> str:
        """Take off what the decoder drops at the start of a text."""
        for content, count in self._strips:
            text = text[min(count, len(text) - len(text.lstrip(content))) :]
        return text

    def _run_bytes(self, token_ids: Sequence[int]) -> bytes:
        return bytes(map(self._byte_of[False].__getitem__, token_ids))

    def _text_of(self, token_id: int, skip: bool) -> str | None:
        """Return the text of a token after others, None if it is a byte or not visible."""
        if skip:
            return None if token_id in self._tokenizer.special_ids else self._texts[False](token_id)
        if token_id in self._byte_of[False] or not self._tokenizer.is_visible(token_id, False):
            return None
        return self._tokenizer.token_text(token_id)

    def _first_text_of(self, token_id: int, skip: bool) -> str | None:
        if self._texts[skip](token_id) is None:
            return None
        return self._tokenizer.decode([token_id], skip)

    @cached_property
    def _any_text(self) -> list[int]:
        """A token that has text in any context; empty if the vocabulary has none."""
        tokenizer = self._tokenizer
        tokens = (i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids)
        return next(([i] for i in tokens if self.opens(i, False)), [])

    def _last_run(self, ids: Sequence[int], skip: bool) -> tuple[int, list[int]]:
        """Return where the run of byte tokens at the end of `ids` starts, and its tokens."""
        start = len(ids)
        run: list[int] = []
        for index in range(len(ids) - 1, -1, -1):
            if self._texts[skip](ids[index]) is not None:
                break
            if ids[index] in self._byte_of[skip]:
                start = index
                run.append(ids[index])
        return start, run[::-1]

    def _context(self, ids: Sequence[int], end: int, skip: bool) -> list[int]:
        """Return the tokens before `end` that the decoding of later tokens depends on.

        They show whether there is text, and that a run of bytes has ended. The last token is always
        kept. Others without text are left out, except the one that starts all text.
        """
        context: list[int] = []
        first: list[int] = []
        for index in range(end - 1, -1, -1):
            token_id = ids[index]
            text = self._texts[skip](token_id)
            if text is None and token_id not in self._byte_of[skip]:
                continue
            if context and text == "":
                first = [token_id]
                continue
            context.insert(0, token_id)
            first = []
            if self._decode(context, skip):
                break
        return first + context


class _TokenwiseScanner:
    """Searches both texts that an open run may turn out to have, and drops one when it ends."""

    def __init__(
        self,
        search: TextSearch,
        texts: Callable[[int], str | None],
        first_texts: Callable[[int], str | None],
        byte_of: dict[int, int],
    ) -> None:
        self.search = search
        self._texts = first_texts  # for the next token
        self._later_texts = texts
        self._byte_of = byte_of
        # While a run is open: the search if it ends up valid, and if it ends up invalid.
        self._run: tuple[TextSearch, TextSearch] | None = None
        self._pending: bytes | None = b""  # incomplete character; None while a run is invalid

    @property
    def is_open(self) -> bool:
        is_first = self._texts is not self._later_texts
        return is_first or self._run is not None or self._pending is None

    def append(self, token_id: int) -> None:
        text = self._texts(token_id)
        if text is not None:
            self.finish()
            self._texts = self._later_texts
            self.search.feed(text)
        elif token_id in self._byte_of:
            self._append_byte(self._byte_of[token_id])

    def finish(self) -> None:
        """End the run of bytes, if there is one."""
        if self._run is not None:
            self.search = self._run[1] if self._pending else self._run[0]
            self._run = None
        self._pending = b""

    def _append_byte(self, byte: int) -> None:
        if self._pending is None:
            self.search.feed(_REPLACEMENT)
            return
        valid, invalid = self._run = self._run or (self.search.copy(), self.search.copy())
        invalid.feed(_REPLACEMENT)
        character = self._pending + bytes([byte])
        self._pending = open_character(character)
        if self._pending is None:
            self.search, self._run = invalid, None
        elif not self._pending:
            valid.feed(character.decode("utf-8"))


def _run_text(run: bytes | bytearray) -> str:
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return _REPLACEMENT * len(run)
