"""The workloads that servers are compared by."""

from __future__ import annotations

import math
from dataclasses import dataclass

from client import SamplingOptions


@dataclass(frozen=True)
class Workload:
    """So many streams, each of which sends its next request when its last one has ended.

    Attributes:
        name: what tables call it.
        streams: requests at once.
        requests: in all.
        prompt_tokens: of each request, those that all share among them.
        output_tokens: of each answer, exactly.
        shared_tokens: with which every prompt begins.
    """

    name: str
    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0

    @property
    def turns(self) -> int:
        """How many requests the busiest stream sends."""
        return math.ceil(self.requests / self.streams)

    @property
    def description(self) -> str:
        """The workload in words."""
        lengths = f"{self.prompt_tokens - self.shared_tokens} in, {self.output_tokens} out"
        if self.shared_tokens:
            lengths = f"{self.shared_tokens} shared + {lengths}"
        return f"{self.streams} streams, {self.requests} requests, {lengths}"


def greedy(output_tokens: int) -> SamplingOptions:
    """Return the options of a greedy answer of exactly so many tokens."""
    return SamplingOptions(
        max_tokens=output_tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True
    )


STANDARD = (
    Workload("W1", 1, 4, 128, 64),
    Workload("W2", 16, 32, 128, 64),
    Workload("W3", 64, 64, 128, 64),
    Workload("W4", 16, 16, 1024, 32),
    Workload("W5", 16, 32, 1056, 32, shared_tokens=1024),
)

# The same in small, to try a peer's command or this benchmark itself within a minute.
TINY = (
    Workload("W1", 1, 2, 16, 8),
    Workload("W2", 2, 4, 16, 8),
    Workload("W3", 4, 4, 16, 8),
    Workload("W4", 2, 2, 64, 4),
    Workload("W5", 2, 4, 72, 4, shared_tokens=64),
)


@dataclass(frozen=True)
class Growth:
    """How servers grow: workloads that differ in one thing only.

    Attributes:
        streams: in the number of streams, all of which send one request.
        context: in the length of the prompts.
    """

    streams: tuple[Workload, ...]
    context: tuple[Workload, ...]

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """All of them, each once."""
        return tuple(dict.fromkeys(self.streams + self.context))


_STREAMS = tuple(Workload(f"S{n}", n, n, 256, 32) for n in (1, 2, 4, 8, 16, 32, 64, 128))
_LONGER = tuple(Workload(f"C{n}", 4, 4, n, 32) for n in (512, 1024, 2048, 4096, 8192))
GROWTH = Growth(streams=_STREAMS, context=(_STREAMS[2], *_LONGER))

TINY_GROWTH = Growth(
    streams=tuple(Workload(f"S{n}", n, n, 16, 4) for n in (1, 4)),
    context=tuple(Workload(f"C{n}", 2, 2, n, 4) for n in (16, 64)),
)
