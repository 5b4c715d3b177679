"""The sizes of the measured work."""

from __future__ import annotations

import random
from dataclasses import dataclass

_OFFLINE_IDS = 10000  # largest token id in a prompt of the offline workload


@dataclass(frozen=True, slots=True)
class Workload:
    """The sizes of one run, in tokens unless stated otherwise.

    Attributes:
        context: of each sequence in a decode step, averaged over the measured steps.
        decode_steps: number of measured steps, after `warm_up_steps` others.
        batches: sequences in a decode step, the most important first.
        prefill: tokens of a prefill step.
        prompt: of a single request.
        sequences: of the offline workload.
        fewest, most: of each prompt and each output of the offline workload.
    """

    context: int = 1024
    decode_steps: int = 48
    warm_up_steps: int = 8
    batches: tuple[int, ...] = (1, 256, 64, 16)
    prefill: int = 8192
    prompt: int = 1024
    sequences: int = 256
    fewest: int = 100
    most: int = 1024

    @property
    def max_model_len(self) -> int:
        """The length of the longest sequence."""
        decode = self.context + self.warm_up_steps + self.decode_steps
        return max(self.prefill, 2 * self.most, decode) + 16

    def offline(self, vocab: int) -> list[tuple[list[int], int]]:
        """Return prompt and number of output tokens per request, as in nano-vllm's benchmark."""
        draw = random.Random(0)
        prompts = [
            [draw.randint(0, _OFFLINE_IDS) % vocab for _ in range(self._length(draw))]
            for _ in range(self.sequences)
        ]
        return [(prompt, self._length(draw)) for prompt in prompts]

    def _length(self, draw: random.Random) -> int:
        return draw.randint(self.fewest, self.most)


FULL = Workload()
SMALL = Workload(48, 6, 2, (1, 8), 64, 32, 8, 5, 20)


def prompts(lengths: list[int], vocab: int, seed: int) -> list[list[int]]:
    """Return random token ids without common prefixes."""
    draw = random.Random(seed)
    return [draw.choices(range(vocab), k=length) for length in lengths]
