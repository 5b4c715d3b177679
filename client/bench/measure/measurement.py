"""Measurement: one run of a workload on one server."""

from __future__ import annotations

from dataclasses import dataclass

from client.bench.load.generators import Ran
from client.bench.load.record import CUT, Record
from client.bench.load.scrape import Metrics
from client.bench.measure.cpu import NOT_OURS, OTHERS, STOLEN

DISTURBED = 0.02  # share of the cores' time used by other programs


@dataclass(frozen=True)
class Measurement:
    """The results of one run of a workload.

    Attributes:
        num_tokens: output tokens received.
        seconds: from the first request intended to the last token received.
        requests: those that were answered in full, or until the run was cut.
        failed, refused: requests without an answer, and those of them of which the server said
            that it has too much to do.
        error: the message that the first of them got, or "".
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
    requests: list[Record]
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
    def tokens_per_response(self) -> float:
        """Mean tokens of a response that has some."""
        responses = sum(len(each.arrivals) for each in self.requests)
        return sum(each.num_tokens for each in self.requests) / max(1, responses)

    @property
    def cpu_per_1000_tokens(self) -> dict[str, float]:
        """CPU seconds by process of the server's and of the load generator's."""
        own = {name: used for name, used in self.cpu_seconds.items() if name not in NOT_OURS}
        return {name: 1000 * used / self.num_tokens for name, used in own.items()}

    @property
    def figures(self) -> dict[str, list[float]]:
        """Of each request: seconds to the first token and to the complete answer, a user's speed.

        `gap`: seconds between any two consecutive responses. `user_speed`: tokens per second from
        the question to the end of the answer.
        """
        return {
            "ttft": [each.ttft for each in self.requests],
            "gap": [gap for each in self.requests for gap in each.gaps],
            "latency": [each.latency for each in self.requests if not each.error],
            "user_speed": [each.num_tokens / each.latency for each in self.requests],
        }

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used more than `DISTURBED`."""
        return self.others > DISTURBED

    def goodput(self, ttft: float, token_time: float) -> float:
        """Return requests per second that were answered in full within both bounds, in seconds."""
        met = (
            not each.error and each.ttft <= ttft and each.token_time <= token_time
            for each in self.requests
        )
        return sum(met) / self.seconds

    @property
    def falls_behind(self) -> bool:
        """Whether latencies grow while requests keep coming: the load is above the capacity."""
        half = len(self.requests) // 2
        if half < 10 or self.requests[-1].intended - self.requests[0].intended < 0.5:
            return False  # too few to judge, or all at once
        ttfts = self.figures["ttft"]
        early, late = (sum(part) / half for part in (ttfts[:half], ttfts[-half:]))
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
    failed = [each for each in ran.records if each.error not in ("", CUT)]
    started = min((each.intended for each in ran.records), default=ran.start)
    ended = max((each.arrivals[-1][0] for each in ran.records if each.arrivals), default=started)
    return Measurement(
        num_tokens=sum(each.num_tokens for each in ran.records),
        seconds=max(ended - started, 1e-9),
        requests=[r for r in ran.records if r.arrivals and r.error in ("", CUT)],
        failed=len(failed),
        refused=sum(each.refused for each in failed),
        error=failed[0].error if failed else "",
        memory=memory,
        cpu_seconds=cpu_seconds,
        others=cpu_seconds[OTHERS] / core_seconds,
        stolen=cpu_seconds[STOLEN] / core_seconds,
        limit=ran.limit,
        metrics=metrics.since(started),
    )
