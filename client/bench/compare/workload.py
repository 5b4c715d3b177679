"""The workloads on which servers are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

from client import SamplingOptions


@dataclass(frozen=True)
class Workload:
    """Concurrent streams, each of which sends its next request when the last has ended.

    Attributes:
        name: shown in tables.
        streams: concurrent requests.
        requests: total number.
        prompt_tokens: of each request, including shared ones.
        output_tokens: of each answer, exactly.
        shared_tokens: length of the prefix that all prompts share.
    """

    name: str
    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0

    @property
    def turns(self) -> int:
        """The most requests that one stream sends."""
        return math.ceil(self.requests / self.streams)

    @property
    def description(self) -> str:
        """The workload as text."""
        lengths = f"{self.prompt_tokens - self.shared_tokens} in, {self.output_tokens} out"
        if self.shared_tokens:
            lengths = f"{self.shared_tokens} shared + {lengths}"
        return f"{self.streams} streams, {self.requests} requests, {lengths}"


def greedy(output_tokens: int) -> SamplingOptions:
    """Return the options of a greedy answer of exactly `output_tokens` tokens."""
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

# Small versions, to try a peer's command or this benchmark itself within a minute.
TINY = (
    Workload("W1", 1, 2, 16, 8),
    Workload("W2", 2, 4, 16, 8),
    Workload("W3", 4, 4, 16, 8),
    Workload("W4", 2, 2, 64, 4),
    Workload("W5", 2, 4, 72, 4, shared_tokens=64),
)


@dataclass(frozen=True)
class Growth:
    """Scaling: workloads that differ in one parameter.

    Attributes:
        streams: workloads by number of streams, each of which sends one request.
        context: workloads by prompt length.
    """

    streams: tuple[Workload, ...]
    context: tuple[Workload, ...]

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """All of them without duplicates."""
        return tuple(dict.fromkeys(self.streams + self.context))


_STREAMS = tuple(Workload(f"S{n}", n, n, 256, 32) for n in (1, 2, 4, 8, 16, 32, 64, 128))
_LONGER = tuple(Workload(f"C{n}", 4, 4, n, 32) for n in (512, 1024, 2048, 4096, 8192))
GROWTH = Growth(streams=_STREAMS, context=(_STREAMS[2], *_LONGER))

TINY_GROWTH = Growth(
    streams=tuple(Workload(f"S{n}", n, n, 16, 4) for n in (1, 4)),
    context=tuple(Workload(f"C{n}", 2, 2, n, 4) for n in (16, 64)),
)
