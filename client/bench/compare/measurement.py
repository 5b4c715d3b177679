"""Measurement: one run of a workload on one server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from client.bench.compare.answer import Answer
from client.bench.cpu import OTHERS, STOLEN

DISTURBED = 0.02  # share of the cores' time used by other programs


@dataclass(frozen=True)
class Measurement:
    """The results of one run of a workload.

    Attributes:
        num_tokens: output tokens received.
        seconds: from the first request sent to the last token received.
        ttfts: time to first token per request, in seconds.
        gaps: seconds between consecutive responses of a request, over all requests.
        num_responses: responses with tokens.
        memory: bytes of the server's processes after the run, shared pages divided (PSS).
        cpu_seconds: by process; other programs as one.
        others: share of the cores' time used by other programs.
        stolen: share of it taken by the host of this virtual machine.
        attempts: number of runs; the least disturbed one counts.
    """

    num_tokens: int
    seconds: float
    ttfts: list[float]
    gaps: list[float]
    num_responses: int
    memory: int
    cpu_seconds: dict[str, float]
    others: float
    stolen: float
    attempts: int = 1

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return self.num_tokens / self.seconds

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used more than `DISTURBED`."""
        return self.others > DISTURBED


def measurement(
    answers: Sequence[Answer],
    *,
    cpu_seconds: dict[str, float],
    core_seconds: float,
    memory: int,
) -> Measurement:
    """Return the measurement of a run with at least one answer.

    Args:
        core_seconds: elapsed seconds times the number of cores.
    """
    started = min(answer.started for answer in answers)
    return Measurement(
        num_tokens=sum(answer.num_tokens for answer in answers),
        seconds=max(answer.arrivals[-1] for answer in answers) - started,
        ttfts=[answer.ttft for answer in answers],
        gaps=[gap for answer in answers for gap in answer.gaps],
        num_responses=sum(len(answer.arrivals) for answer in answers),
        memory=memory,
        cpu_seconds=cpu_seconds,
        others=cpu_seconds[OTHERS] / core_seconds,
        stolen=cpu_seconds[STOLEN] / core_seconds,
    )
