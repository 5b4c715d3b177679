"""Seeded prompts of an exact length, and the requests of `trident bench stages`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from client import SamplingOptions
from client.bench.load import prompts


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


class PromptSource:
    """Draws prompts of `num_tokens` tokens; as `load.prompts.PromptSource`, of one length."""

    def __init__(self, tokenizer: Path, num_tokens: int) -> None:
        self._source = prompts.PromptSource(tokenizer)
        self._num_tokens = num_tokens

    def draw(self, seed: str, count: int) -> list[prompts.Prompt]:
        """Return `count` prompts, determined by `seed`."""
        return [
            self._source.prompt(f"{seed}/{number}", self._num_tokens) for number in range(count)
        ]
