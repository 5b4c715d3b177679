"""Seeded prompts of an exact length, and the requests of `trident bench stages`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from client import SamplingOptions
from client.bench.errors import BenchError
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Workload:
    """The requests of one measurement; all figures are at least 1.

    Attributes:
        streams: numbers of concurrent requests to measure, in turn.
        prompt_tokens, max_tokens: of each request.
        waves: waves of requests per round and number of streams.
        rounds: alternations between engine alone and ensemble.
    """

    streams: tuple[int, ...] = (1, 16, 64)
    prompt_tokens: int = 128
    max_tokens: int = 128
    waves: int = 3
    rounds: int = 2

    @property
    def sampling(self) -> SamplingOptions:
        """Greedy and of exact length; sets all that a checkpoint's defaults could change."""
        return SamplingOptions(
            max_tokens=self.max_tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True
        )


@dataclass(frozen=True)
class Prompt:
    """A prompt as text, for the ensemble, and as its token ids."""

    text: str
    token_ids: list[int]


class PromptSource:
    """Draws prompts of `num_tokens` tokens from the words of a tokenizer's vocabulary.

    Raises:
        CheckpointError: `tokenizer` has no usable tokenizer.
        BenchError: no text of its words has this number of tokens.
    """

    def __init__(self, tokenizer: Path, num_tokens: int) -> None:
        self._tokenizer = Tokenizer.from_pretrained(tokenizer)
        self._num_tokens = num_tokens
        self._words = list(_words(self._tokenizer))
        if len(self._words) < 2:
            raise BenchError("the tokenizer's vocabulary has no words to make prompts from")

    def draw(self, seed: str, count: int, *, shared: int = 0) -> list[Prompt]:
        """Return `count` prompts, determined by `seed`.

        Args:
            shared: length of the prefix that all prompts share, below that of a prompt.
        """
        assert 0 <= shared < self._num_tokens
        generator = random.Random(seed)
        beginning = generator.choices(self._words, k=shared)
        return [self._prompt(generator, beginning) for _ in range(count)]

    def _prompt(self, generator: random.Random, beginning: list[str]) -> Prompt:
        count = self._num_tokens - len(beginning)
        words = beginning + generator.choices(self._words, k=count)
        # BOS tokens count, and so may the space before the first word.
        for _ in range(self._num_tokens):
            text = "".join(words)
            token_ids = self._tokenizer.encode(text)
            missing = self._num_tokens - len(token_ids)
            if missing == 0:
                return Prompt(text, token_ids)
            if missing < 0:
                words = words[:missing]
            else:
                words += generator.choices(self._words, k=missing)
        raise BenchError(f"cannot make a prompt of exactly {self._num_tokens} tokens")


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
