"""Periodic measurements of every process of a server."""

from __future__ import annotations

import contextlib
import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.server.resilience.processes import Tree, shared_memory_bytes
from tests.server.resilience.trend import Trend, allowed_growth

MEASURES = ("rss", "uss", "pss", "shared memory", "descriptors", "threads")


@dataclass(frozen=True)
class Sample:
    """Measurements of one process; sizes in bytes.

    Attributes:
        seconds: since the first sample.
        values: in the order of `MEASURES`.
    """

    seconds: float
    role: str
    values: tuple[int, ...]


class SamplerOutput:
    """All measurements."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._begin = time.monotonic()
        self._samples: list[Sample] = []

    def take(self) -> None:
        """Measure each process once."""
        seconds = time.monotonic() - self._begin
        for role, process in self._tree.members().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._samples.append(Sample(seconds, role, _measure(process)))

    def trends(self, warm_up_s: float) -> Iterator[tuple[str, str, Trend]]:
        """Yield role, measure and trend of each series, from `warm_up_s` on."""
        later = [sample for sample in self._samples if sample.seconds >= warm_up_s]
        for role in dict.fromkeys(sample.role for sample in later):
            own = [sample for sample in later if sample.role == role]
            for index, measure in enumerate(MEASURES):
                values = [sample.values[index] for sample in own]
                if len(own) > 1 and any(values):
                    yield role, measure, _trend([s.seconds for s in own], values, measure)

    def write(self, path: Path) -> None:
        """Write a CSV file, one line per process and time."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["seconds", "process", *MEASURES])
            for sample in self._samples:
                writer.writerow([f"{sample.seconds:.1f}", sample.role, *sample.values])


def _trend(seconds: Sequence[float], values: Sequence[float], measure: str) -> Trend:
    return Trend.of(seconds, values, allowed_growth(measure, values[0]))


def _measure(process: psutil.Process) -> tuple[int, ...]:
    memory = process.memory_full_info()
    return (
        memory.rss,
        memory.uss,
        memory.pss,
        shared_memory_bytes(process),
        process.num_fds(),
        process.num_threads(),
    )
