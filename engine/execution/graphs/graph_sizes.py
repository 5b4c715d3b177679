"""Step sizes for which CUDA graphs are captured: few graphs, and little padding."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

# Mixed steps: few tokens take as long as the weights take to be read, whatever their number is.
_SPACING = 64
_ALWAYS = 512  # tokens up to which mixed steps are captured for every model
_MOST = 2048
# The host needs about as long for a step besides launching its kernels.
_HOST_S = 1e-3


class GraphSizes(NamedTuple):
    """For which steps there are graphs.

    Attributes:
        decode: numbers of rows of decode steps, ascending; the last is `max_num_seqs`.
        mixed: numbers of tokens of mixed steps, ascending.
    """

    decode: list[int]
    mixed: list[int]

    @property
    def num_steps(self) -> int:
        """How many sizes there are."""
        return len(self.decode) + len(self.mixed)

    def some(self) -> GraphSizes:
        """Return the largest and the smallest of each, and every eighth in between."""
        decode, mixed = (sorted({sizes[0], *sizes[::-8]}) for sizes in self)
        return GraphSizes(decode, mixed)


class StepTime(NamedTuple):
    """Seconds of a step that is launched kernel by kernel while the device is idle."""

    launch_s: float  # until the host has launched it
    total_s: float  # until the device has computed it

    @property
    def is_short(self) -> bool:
        """Whether the device would wait for the host if such steps were not captured."""
        return self.total_s - self.launch_s < _HOST_S


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows captured for decode steps: about an eighth is padding at most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def mixed_sizes(max_num_batched_tokens: int, time_step: Callable[[int], StepTime]) -> list[int]:
    """Return the numbers of tokens captured for mixed steps.

    From 512 tokens on at most an eighth is padding, and only steps that are short are captured:
    others keep the device busy while the host launches them. `time_step` measures a step of so many
    tokens; longer ones take longer.
    """
    largest = min(max_num_batched_tokens, _MOST)
    sizes = [
        *range(_SPACING, _ALWAYS, _SPACING),
        *range(_ALWAYS, 1024, 64),
        *range(1024, _MOST, 128),
    ]
    # Most steps with a prompt of many tokens use the whole budget: it gets a size of its own.
    sizes = [*(size for size in sizes if size < largest), largest]
    first = bisect_left(sizes, _ALWAYS + 1)
    end = bisect_left(sizes, True, lo=first, key=lambda size: not time_step(size).is_short)
    return sizes[:end]


def next_size(sizes: list[int], size: int) -> int | None:
    """Return the smallest of the ascending `sizes` that is not below `size`, None if all are."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


def time_step(run: Callable[[], object], synchronize: Callable[[], None]) -> StepTime:
    """Measure `run`, which launches a step: the quickest of three, after one to warm up."""
    run()
    times = []
    for _ in range(3):
        synchronize()
        begin = time.perf_counter()
        run()
        launched = time.perf_counter()
        synchronize()
        times.append(StepTime(launched - begin, time.perf_counter() - begin))
    return min(times, key=lambda found: found.total_s)
