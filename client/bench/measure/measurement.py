"""Measurement: one run of a workload on one server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from client.bench.load.generators import Ran
from client.bench.load.record import CUT, Record
from client.bench.load.scrape import Metrics
from client.bench.measure.cpu import NOT_OURS, OTHERS, STOLEN

DISTURBED = 0.02  # share of the cores' time used by other programs


class Request(NamedTuple):
    """One answered request; seconds since the run's beginning.

    Attributes:
        intended: when it should have been sent; latencies count from then.
        first, last: when its first and last tokens came.
        prompt_tokens, cached_tokens, output_tokens: as the server counts them.
        token_time: mean seconds per token after the first response.
        is_whole: whether it was answered in full; else until the run was cut.
    """

    intended: float
    first: float
    last: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    token_time: float
    is_whole: bool = True


@dataclass(frozen=True)
class Measurement:
    """The results of one run of a workload.

    Attributes:
        num_tokens: output tokens received.
        seconds: from the first request intended to the last token received.
        requests: those that were answered in full, or until the run was cut.
        gaps: seconds between consecutive responses of a request, over all requests.
        num_responses: responses with tokens.
        failed, refused: requests without an answer, and those of them of which the server said
            that it has too much to do.
        error: what the first of them was told, or "".
        memory: bytes of the server's processes after the run, shared pages divided (PSS).
        cpu_seconds: by process; other programs as one.
        others: share of the cores' time used by other programs.
        stolen: share of it taken by the host of this virtual machine.
        limit: why the figures may be the load generator's, or "".
        metrics: what the server said of itself.
        attempts: number of runs; the least disturbed one counts.
    """

    num_tokens: int
    seconds: float
    requests: list[Request]
    gaps: list[float]
    num_responses: int
    failed: int
    refused: int
    error: str
    memory: int
    cpu_seconds: dict[str, float]
    others: float
    stolen: float
    limit: str
    metrics: Metrics
    attempts: int = 1

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return self.num_tokens / self.seconds

    @property
    def cpu_per_1000_tokens(self) -> dict[str, float]:
        """CPU seconds by process of the server's and of the load generator's."""
        own = {name: used for name, used in self.cpu_seconds.items() if name not in NOT_OURS}
        return {name: 1000 * used / self.num_tokens for name, used in own.items()}

    @property
    def ttfts(self) -> list[float]:
        """Time to first token per request, in seconds."""
        return [each.first - each.intended for each in self.requests]

    @property
    def latencies(self) -> list[float]:
        """Time to the complete answer per request, in seconds."""
        return [each.last - each.intended for each in self.requests if each.is_whole]

    @property
    def user_speeds(self) -> list[float]:
        """Tokens per second that each user saw, from the question to the end of the answer."""
        return [each.output_tokens / (each.last - each.intended) for each in self.requests]

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used more than `DISTURBED`."""
        return self.others > DISTURBED

    def goodput(self, ttft: float, token_time: float) -> float:
        """Return requests per second that met both bounds, in seconds."""
        met = (
            each.first - each.intended <= ttft and each.token_time <= token_time
            for each in self.requests
        )
        return sum(met) / self.seconds

    @property
    def falls_behind(self) -> bool:
        """Whether latencies grow while requests keep coming: the load is above the capacity."""
        half = len(self.requests) // 2
        if half < 10:
            return False
        early, late = (sum(part) / half for part in (self.ttfts[:half], self.ttfts[-half:]))
        return late > 2 * early and late - early > 1.0


def measurement(
    ran: Ran,
    *,
    cpu_seconds: dict[str, float],
    core_seconds: float,
    memory: int,
    metrics: Metrics,
) -> Measurement:
    """Return the measurement of a run.

    Args:
        core_seconds: elapsed seconds times the number of cores.
    """
    answered = [each for each in ran.records if each.arrivals and each.error in ("", CUT)]
    failed = [each for each in ran.records if each.error not in ("", CUT)]
    started = min((each.intended for each in ran.records), default=ran.start)
    ended = max((each.arrivals[-1][0] for each in ran.records if each.arrivals), default=started)
    return Measurement(
        num_tokens=sum(each.num_tokens for each in ran.records),
        seconds=max(ended - started, 1e-9),
        requests=[_request(each, started) for each in answered],
        gaps=[gap for each in answered for gap in each.gaps],
        num_responses=sum(len(each.arrivals) for each in answered),
        failed=len(failed),
        refused=sum(each.refused for each in failed),
        error=failed[0].error if failed else "",
        memory=memory,
        cpu_seconds=cpu_seconds,
        others=cpu_seconds[OTHERS] / core_seconds,
        stolen=cpu_seconds[STOLEN] / core_seconds,
        limit=ran.effort.was_the_limit,
        metrics=metrics.since(started),
    )


def _request(record: Record, started: float) -> Request:
    return Request(
        record.intended - started,
        record.arrivals[0][0] - started,
        record.arrivals[-1][0] - started,
        record.prompt_tokens,
        record.cached_tokens,
        record.num_tokens,
        record.token_time,
        not record.error,
    )
