"""Scrapes a server while it is measured: its metrics in Prometheus' form."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from prometheus_client.parser import text_string_to_metric_families

# Opens addresses without a proxy, which would be measured too.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0
# In vLLM's names, which are Trident's too; without their prefix.
_COUNTERS = ("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
_QUEUE = ("request_queue_time_seconds_sum", "request_queue_time_seconds_count")
# Of tritonserver: joules of all GPUs, and the share of the time in which one was busy.
_ENERGY, _GPU_USE = "nv_energy_consumption", "nv_gpu_utilization"
_RUNNING, _WAITING = "num_requests_running", "num_requests_waiting"
_KV_USE = "kv_cache_usage_perc"
_WANTED = (*_COUNTERS, *_QUEUE, _ENERGY, _GPU_USE, _RUNNING, _WAITING, _KV_USE)
# Of hundreds, to read which would take 10 ms, on the cores that the server has.
_LINES = re.compile(rf"^(?:\w+:)?(?:{'|'.join(_WANTED)})[{{ ].*$", re.MULTILINE)


class Sample(NamedTuple):
    """The server at one moment: seconds, sequences, and the share of the KV blocks in use.

    Attributes:
        kv_waste: share of the slots of these blocks that hold no token; None: servers do not report
            it.
        kv_saved: share of the blocks that sequences would hold more if they shared none; or None.
        gpu_use: share of the time in which GPUs were busy, summed over them.
    """

    at: float
    running: float
    waiting: float
    kv_usage: float
    kv_waste: float | None = None
    kv_saved: float | None = None
    gpu_use: float | None = None


@dataclass(frozen=True)
class Metrics:
    """What was read.

    Attributes:
        samples: over time.
        preemptions: during the run.
        prefix_hits: share of the looked-up prompt tokens that were in the prefix cache.
        queue_s: mean seconds from arrival to the first step.
        gpu_joules: energy of the GPUs; 0: unknown.
    """

    samples: list[Sample] = field(default_factory=list)
    preemptions: float = 0.0
    prefix_hits: float = 0.0
    queue_s: float = 0.0
    gpu_joules: float = 0.0

    def since(self, start: float) -> Metrics:
        """Return the same with times relative to `start`."""
        moved = [each._replace(at=each.at - start) for each in self.samples]
        return replace(self, samples=moved)


class Scraper:
    """A context manager that reads a server's metrics in a thread, inside the block.

    Args:
        url: of the metrics; empty: there are none.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[Sample] = []
        self._first: Mapping[str, float] = {}
        self._last: Mapping[str, float] = {}

    @property
    def taken(self) -> Metrics:
        """What was read, after the block."""

        def grown(name: str) -> float:
            return self._last.get(name, 0.0) - self._first.get(name, 0.0)

        preemptions, queries, hits = (grown(name) for name in _COUNTERS)
        waited, started = (grown(name) for name in _QUEUE)
        return Metrics(
            samples=self._samples,
            preemptions=preemptions,
            prefix_hits=hits / queries if queries else 0.0,
            queue_s=waited / started if started else 0.0,
            gpu_joules=grown(_ENERGY),
        )

    def __enter__(self) -> Self:
        if self._url:
            self._first = self._read() or {}
            self._thread = threading.Thread(target=self._follow, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._last = self._read() or self._last

    def _follow(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            at = time.monotonic()
            if (found := self._read()) is None:
                continue
            self._last = found
            self._samples.append(
                Sample(
                    at,
                    found.get(_RUNNING, 0.0),
                    found.get(_WAITING, 0.0),
                    found.get(_KV_USE, 0.0),
                    gpu_use=found.get(_GPU_USE),
                )
            )

    def _read(self) -> dict[str, float] | None:
        """Return the sums of what is wanted by name, without prefix; None if there is none now."""
        try:
            with DIRECT.open(self._url, timeout=_TIMEOUT_S) as response:
                text = "\n".join(_LINES.findall(response.read().decode()))
            found: dict[str, float] = {}
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    name = sample.name.rpartition(":")[2]
                    found[name] = found.get(name, 0.0) + sample.value
        except (OSError, ValueError):
            return None
        return found
