"""Requests with seeded prompts of an exact number of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from client.bench.errors import BenchError
from engine.text.tokenizer import Tokenizer


class Turn(msgspec.Struct):
    """One request: its prompt as text, for the ensemble, and as tokens; the length of an answer."""

    text: str
    token_ids: list[int]
    output_tokens: int


class PromptSource:
    """Makes prompts from the words of a tokenizer's vocabulary.

    Raises:
        CheckpointError: `tokenizer` has no usable tokenizer.
        BenchError: its vocabulary has no words.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_pretrained(tokenizer)
        self._words = list(_words(self._tokenizer))
        if len(self._words) < 2:
            raise BenchError(
                "the tokenizer's vocabulary has no words to make prompts from; give another --model"
            )

    def words(self, seed: str, count: int) -> list[str]:
        """Return `count` words of about a token each, determined by `seed`."""
        return random.Random(seed).choices(self._words, k=count)

    def encode(self, text: str, output_tokens: int) -> Turn:
        """Return a request with `text` as its prompt."""
        return Turn(text, self._tokenizer.encode(text), output_tokens)

    def turn(
        self, seed: str, num_tokens: int, output_tokens: int, beginning: Sequence[str] = ()
    ) -> Turn:
        """Return one with a prompt of exactly `num_tokens` that starts with the words `beginning`.

        Raises:
            BenchError: there is none.
        """
        generator = random.Random(seed)
        words = [*beginning][:num_tokens]
        words += generator.choices(self._words, k=num_tokens - len(words))
        # BOS tokens count, and so may the space before the first word.
        for _ in range(num_tokens + 1):
            turn = self.encode("".join(words), output_tokens)
            missing = num_tokens - len(turn.token_ids)
            if missing == 0:
                return turn
            if missing < 0:
                words = words[:missing]
            else:
                words += generator.choices(self._words, k=missing)
        raise BenchError(f"cannot make a prompt of exactly {num_tokens} tokens")


def _words(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield words with a leading space that are one token inside a sentence."""
    start = tokenizer.encode("a", add_special_tokens=False)
    for token_id in range(tokenizer.vocab_size):
        if not tokenizer.is_visible(token_id, skip_special_tokens=True):
            continue
        text = tokenizer.token_text(token_id)
        if text[:1] != " " or not text[1:].isalpha():
            continue
        # Encoded inside a sentence: at its start, many tokenizers add or drop a space.
        if tokenizer.encode(f"a{text}", add_special_tokens=False) == [*start, token_id]:
            yield text
