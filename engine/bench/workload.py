"""How much of everything is measured."""

from __future__ import annotations

import random
from dataclasses import dataclass

_OFFLINE_IDS = 10000  # the largest in a prompt of the offline workload


@dataclass(frozen=True, slots=True)
class Workload:
    """The sizes of one run, in tokens where nothing else is said.

    Attributes:
        context: of each sequence in a decode step, on average over the steps measured.
        decode_steps: that are measured, and `warm_up_steps` before them.
        batches: sequences in a decode step, the most telling first.
        prefill: tokens of a prefill step.
        prompt: of a single request.
        repeats: of a prefill, and of a single request.
        sequences: of the offline workload.
        shared: its first sequences, which transformers are given too.
        fewest, most: of each prompt and each output of the offline workload.
    """

    context: int = 1024
    decode_steps: int = 48
    warm_up_steps: int = 8
    batches: tuple[int, ...] = (1, 256, 64, 16)
    prefill: int = 8192
    prompt: int = 1024
    repeats: int = 5
    sequences: int = 256
    shared: int = 64
    fewest: int = 100
    most: int = 1024

    @property
    def max_model_len(self) -> int:
        """What the longest sequence needs."""
        decode = self.context + self.warm_up_steps + self.decode_steps
        return max(self.prefill, 2 * self.most, decode) + 16

    def offline(self) -> list[tuple[list[int], int]]:
        """Return prompt and tokens out of every request: as nano-vllm's benchmark draws them."""
        draw = random.Random(0)
        prompts = [
            [draw.randint(0, _OFFLINE_IDS) for _ in range(draw.randint(self.fewest, self.most))]
            for _ in range(self.sequences)
        ]
        return [(prompt, draw.randint(self.fewest, self.most)) for prompt in prompts]


FULL = Workload()
SMALL = Workload(
    context=48,
    decode_steps=6,
    warm_up_steps=2,
    batches=(1, 8),
    prefill=64,
    prompt=32,
    repeats=2,
    sequences=8,
    shared=4,
    fewest=5,
    most=20,
)


def prompts(lengths: list[int], vocab: int, seed: int) -> list[list[int]]:
    """Return random token ids, which share no prefix."""
    draw = random.Random(seed)
    return [draw.choices(range(vocab), k=length) for length in lengths]
