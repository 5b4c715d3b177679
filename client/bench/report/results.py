"""The results of a run, and the plain data that reports are made of: medians over the rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
from msgspec import to_builtins

from client.bench.load.workload import Workload
from client.bench.measure.measurement import Measurement

Row = dict[str, Any]


@dataclass(frozen=True)
class Bounds:
    """What goodput demands of a request: seconds to the first token, and per token after it."""

    ttft: float = 2.0
    token_time: float = 0.2


@dataclass(frozen=True)
class Run:
    """A measured workload; `start_seconds`: of its server, from launch to the first token."""

    server: str
    workload: str
    round: int
    start_seconds: float
    measurement: Measurement


@dataclass
class Results:
    """All results of a comparison.

    Attributes:
        tridents: the servers that ratios are relative to.
        runs: as they were measured.
        failures: by server, why figures are missing.
        interrupted: whether the run ended before all rounds were measured.
    """

    workloads: Sequence[Workload]
    tridents: Sequence[str]
    runs: list[Run] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    def measured(self, workload: str, server: str) -> dict[int, Measurement]:
        """Return the measurements by round."""
        found = [run for run in self.runs if (run.workload, run.server) == (workload, server)]
        return {run.round: run.measurement for run in found}

    def ratios(self, workload: str, server: str) -> dict[str, float]:
        """Return tokens per second of each Trident relative to a server's.

        The median over the rounds that both completed: each ratio is within one round, so that the
        machine's load cancels.
        """
        ours = self.measured(workload, server)
        found = {}
        for trident in self.tridents:
            theirs = self.measured(workload, trident)
            if both := [
                theirs[number].tokens_per_second / one.tokens_per_second
                for number, one in ours.items()
                if number in theirs
            ]:
                found[trident] = median(both)
        return found


def _percentile(name: str, percent: float, one: Measurement) -> float:
    return _percentiles(one.figures[name], percent)[0]


# What `trident bench diff` compares, by round.
_METRICS: dict[str, Callable[[Measurement], float]] = {
    "tok/s": lambda one: one.tokens_per_second,
    **{
        f"{title} p{percent}, s": partial(_percentile, name, percent)
        for title, name in (("TTFT", "ttft"), ("inter-token", "gap"), ("latency", "latency"))
        for percent in (50, 99)
    },
    "tok/s of a user, p50": partial(_percentile, "user_speed", 50),
}


def as_json(results: Results, bounds: Bounds) -> dict[str, Any]:
    """Return everything as plain data, a row of `summary` per workload and server."""
    servers = dict.fromkeys(run.server for run in results.runs)
    pairs = [(workload.name, server) for workload in results.workloads for server in servers]
    found: dict[str, Any] = to_builtins(
        {
            "summary": [_row(results, bounds, *each) for each in pairs if results.measured(*each)],
            "workloads": [
                {"text": each.description, **to_builtins(each, enc_hook=str)}
                for each in results.workloads
            ],
            "tridents": results.tridents,
            "bounds": bounds,
            "cores": len(os.sched_getaffinity(0)),
            "runs": results.runs,
            "failures": results.failures,
            "interrupted": results.interrupted,
        }
    )
    return found


def _row(results: Results, bounds: Bounds, workload: str, server: str) -> Row:
    """Return the figures of one workload on one server. Times in seconds, memory in bytes."""
    measured = list(results.measured(workload, server).values())

    def over(name: str, *percents: float) -> list[float]:
        return _percentiles([value for one in measured for value in one.figures[name]], *percents)

    told = [one for one in measured if one.metrics.samples]  # by the server itself
    seen = [sample for one in told for sample in one.metrics.samples]
    names = dict.fromkeys(name for one in measured for name in one.cpu_per_1000_tokens)
    cpu = [one.cpu_per_1000_tokens for one in measured]
    speeds = [one.tokens_per_second for one in measured]
    starts = {run.round: run.start_seconds for run in results.runs if run.server == server}
    return {
        "workload": workload,
        "server": server,
        "speed": {"median": median(speeds), "min": min(speeds), "max": max(speeds)},
        "rounds": {name: [of(one) for one in measured] for name, of in _METRICS.items()},
        "ratios": results.ratios(workload, server),
        # Over all requests, and over all pairs of consecutive responses.
        **{name: over(name, 50, 90, 99) for name in ("ttft", "gap", "latency")},
        "user_speed": over("user_speed", 50, 10, 1),
        "goodput": median(one.goodput(bounds.ttft, bounds.token_time) for one in measured),
        "failed": sum(one.failed for one in measured),
        "refused": sum(one.refused for one in measured),
        "queue": _told(median, (one.metrics.queue_s for one in told)),
        "prefix_hits": _told(median, (one.metrics.prefix_hits for one in told)),
        "preemptions": _told(median, (one.metrics.preemptions for one in told)),
        "kv_use": max((each.kv_usage for each in seen), default=None),
        # Means over time, of what the engine alone counts.
        "kv_waste": _told(fmean, (each.kv_waste for each in seen)),
        "kv_saved": _told(fmean, (each.kv_saved for each in seen)),
        "gpu_use": _told(fmean, (each.gpu_use for each in seen)),
        "joules": _told(median, (1000 * one.metrics.gpu_joules / one.num_tokens for one in told)),
        "cpu": {name: median(each.get(name, 0.0) for each in cpu) for name in names},
        "tokens_per_response": median(one.tokens_per_response for one in measured),
        "memory": median(one.memory for one in measured),
        "start": median(starts.values()),
        "others": max(one.others for one in measured),
        "stolen": max(one.stolen for one in measured),
        "is_disturbed": any(one.is_disturbed for one in measured),
        "falls_behind": any(one.falls_behind for one in measured),
        "limit": next((one.limit for one in measured if one.limit), ""),
    }


def _percentiles(values: Sequence[float], *percents: float) -> list[float]:
    """Return percentiles of `values`; zeros if there are none."""
    return [float(each) for each in np.percentile(values or [0.0], percents)]


def _told(
    statistic: Callable[[list[float]], float], values: Iterable[float | None]
) -> float | None:
    """Return a statistic of the values that a server reported; None: it reported none."""
    found = [each for each in values if each is not None]
    return statistic(found) if found else None
