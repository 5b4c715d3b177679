"""The results as a table and as JSON: medians over the rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np
from msgspec import to_builtins

from client.bench.load.workload import Workload
from client.bench.measure.measurement import Measurement

Percentiles = tuple[float, float, float]  # p50, p90, p99


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of `values`; 0 if there are none."""
    return float(np.percentile(values, percent)) if values else 0.0


@dataclass(frozen=True)
class Spread:
    """The median of some figures, with the smallest and the largest."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise `values`, which must not be empty."""
        return cls(median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        low, middle, high = (format(v, spec) for v in (self.min, self.median, self.max))
        return f"{middle}\n{low}-{high}"


@dataclass(frozen=True)
class Bounds:
    """What goodput demands of a request: seconds to the first token, and per token after it."""

    ttft: float = 2.0
    token_time: float = 0.2


@dataclass
class Session:
    """One server's results from start to exit.

    Attributes:
        start_seconds: from launch to the first token.
        measurements: by name of the workload.
    """

    start_seconds: float
    measurements: dict[str, Measurement] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Results of one workload on one server. Times in seconds, memory in bytes.

    Attributes:
        speed: output tokens per second, over the rounds.
        rounds: by metric, its value in each round.
        ratios: tokens per second of each Trident relative to this server's, over the rounds that
            both completed. Each ratio is within one round, so that machine load cancels.
        ttft, gap, latency: over all requests, and over all pairs of consecutive responses.
        user_speed: tokens per second that a user sees, over all requests: p50, p10, p1.
        goodput: requests per second within the bounds; the median.
        failed, refused: requests, of all rounds.
        queue, prefix_hits, preemptions, gpu_use, joules: of the server's own metrics, or None;
            joules of the GPUs per 1000 tokens.
        kv_use: the largest share of the KV blocks in use, or None.
        kv_waste: share of the slots in use that hold no token, the mean over time; as the next one
            counted by the engine alone, else None.
        kv_saved: share of the blocks that sequences without shared blocks would need and these do
            not, the mean over time.
        cpu: seconds by process per 1000 tokens.
        memory: the median.
        start: the median; the same for all workloads of a server.
        others: share of the cores' time used by other programs: the largest of the rounds.
        is_disturbed: whether that is too much to trust the figures.
        falls_behind: whether latencies grew while requests kept coming.
        limit: why the figures may be the load generator's, or "".
    """

    workload: str
    server: str
    speed: Spread
    rounds: dict[str, list[float]]
    ratios: dict[str, float]
    ttft: Percentiles
    gap: Percentiles
    latency: Percentiles
    user_speed: Percentiles
    goodput: float
    failed: int
    refused: int
    queue: float | None
    prefix_hits: float | None
    preemptions: float | None
    kv_use: float | None
    kv_waste: float | None
    kv_saved: float | None
    gpu_use: float | None
    joules: float | None
    cpu: dict[str, float]
    tokens_per_response: float
    memory: float
    start: float
    others: float
    is_disturbed: bool
    falls_behind: bool
    limit: str


@dataclass
class Results:
    """All results of a comparison.

    Attributes:
        tridents: the servers that ratios are relative to.
        sessions: by server and round; None if it failed, fewer if interrupted.
        failures: by server, why figures are missing.
        interrupted: whether the run ended before all rounds were measured.
    """

    workloads: Sequence[Workload]
    tridents: Sequence[str]
    sessions: dict[str, list[Session | None]]
    failures: dict[str, str]
    interrupted: bool = False

    def rows(self, bounds: Bounds) -> list[Row]:
        """Return one row per workload and server measured together."""
        rows = (
            self._row(workload.name, server, bounds)
            for workload in self.workloads
            for server in self.sessions
        )
        return [row for row in rows if row is not None]

    def measured(self, workload: str, server: str) -> dict[int, Measurement]:
        """Return the measurements by round."""
        return {
            number: session.measurements[workload]
            for number, session in enumerate(self.sessions[server])
            if session is not None and workload in session.measurements
        }

    def all_measured(self) -> list[Measurement]:
        """Return all measurements."""
        return [
            one
            for server in self.sessions
            for workload in self.workloads
            for one in self.measured(workload.name, server).values()
        ]

    def _row(self, workload: str, server: str, bounds: Bounds) -> Row | None:
        by_round = self.measured(workload, server)
        measured = list(by_round.values())
        if not measured:
            return None

        def over(values: Callable[[Measurement], list[float]], *percents: float) -> Percentiles:
            together = [value for one in measured for value in values(one)]
            first, second, third = (percentile(together, each) for each in percents)
            return first, second, third

        told = [one for one in measured if one.metrics.samples]
        seen = [sample for one in told for sample in one.metrics.samples]
        names = dict.fromkeys(name for one in measured for name in one.cpu_per_1000_tokens)
        cpu = [one.cpu_per_1000_tokens for one in measured]
        return Row(
            workload=workload,
            server=server,
            speed=Spread.of([one.tokens_per_second for one in measured]),
            rounds={name: [of(one) for one in measured] for name, of in _METRICS.items()},
            ratios=self._ratios(workload, by_round),
            ttft=over(lambda one: one.ttfts, 50, 90, 99),
            gap=over(lambda one: one.gaps, 50, 90, 99),
            latency=over(lambda one: one.latencies, 50, 90, 99),
            user_speed=over(lambda one: one.user_speeds, 50, 10, 1),
            goodput=median(one.goodput(bounds.ttft, bounds.token_time) for one in measured),
            failed=sum(one.failed for one in measured),
            refused=sum(one.refused for one in measured),
            queue=_median(one.metrics.queue_s for one in told),
            prefix_hits=_median(one.metrics.prefix_hits for one in told),
            preemptions=_median(one.metrics.preemptions for one in told),
            kv_use=max((each.kv_usage for each in seen), default=None),
            kv_waste=_mean(each.kv_waste for each in seen),
            kv_saved=_mean(each.kv_saved for each in seen),
            gpu_use=_mean(each.gpu_use for each in seen),
            joules=_median(1000 * one.metrics.gpu_joules / one.num_tokens for one in told),
            cpu={name: median(each.get(name, 0.0) for each in cpu) for name in names},
            tokens_per_response=median(one.tokens_per_response for one in measured),
            memory=median(one.memory for one in measured),
            start=median(each.start_seconds for each in self.sessions[server] if each is not None),
            others=max(one.others for one in measured),
            is_disturbed=any(one.is_disturbed for one in measured),
            falls_behind=any(one.falls_behind for one in measured),
            limit=next((one.limit for one in measured if one.limit), ""),
        )

    def _ratios(self, workload: str, by_round: Mapping[int, Measurement]) -> dict[str, float]:
        ratios = {}
        for trident in self.tridents:
            theirs = self.measured(workload, trident)
            both = [
                theirs[number].tokens_per_second / one.tokens_per_second
                for number, one in by_round.items()
                if number in theirs
            ]
            if both:
                ratios[trident] = median(both)
        return ratios


# What `trident bench diff` compares, by round.
_METRICS: dict[str, Callable[[Measurement], float]] = {
    "tok/s": lambda one: one.tokens_per_second,
    "TTFT p50, s": lambda one: percentile(one.ttfts, 50),
    "TTFT p99, s": lambda one: percentile(one.ttfts, 99),
    "inter-token p50, s": lambda one: percentile(one.gaps, 50),
    "inter-token p99, s": lambda one: percentile(one.gaps, 99),
    "latency p50, s": lambda one: percentile(one.latencies, 50),
    "latency p99, s": lambda one: percentile(one.latencies, 99),
    "tok/s of a user, p50": lambda one: percentile(one.user_speeds, 50),
}


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = [each for each in values if each is not None]
    return fmean(found) if found else None


def as_json(results: Results, bounds: Bounds) -> dict[str, Any]:
    """Return everything as plain data."""
    found: dict[str, Any] = to_builtins(
        {
            "summary": results.rows(bounds),
            "workloads": [
                {"text": each.description, **to_builtins(each, enc_hook=str)}
                for each in results.workloads
            ],
            "bounds": bounds,
            "cores": len(os.sched_getaffinity(0)),
            "rounds": results.sessions,
            "failures": results.failures,
            "interrupted": results.interrupted,
        }
    )
    return found
