"""MetricBoard: batches updates of the server's /metrics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("trident.metrics")

PUBLISH_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 2.0

Metric = Any  # pb_utils.Metric


class MetricBoard:
    """Collects updates, and sends them to the server from its own thread.

    Each update of a metric is a round trip of some 20 us (measured with release 24.10), so all
    updates of a metric in one interval go in one: the cost is bounded, whatever the load.
    Thread-safe; only the creation of a metric waits for the server. Never update a metric inside
    `execute`: release 24.10 then sometimes dies of a `lock_exception`. Failed updates are retried.
    """

    def __init__(
        self,
        make_family: Any,
        labels: Mapping[str, str],
        interval_s: float = PUBLISH_INTERVAL_S,
    ) -> None:
        """Start the thread.

        Args:
            make_family: `pb_utils.MetricFamily`.
            labels: of every metric.
            interval_s: seconds between rounds.
        """
        self._make_family = make_family
        self._labels = dict(labels)
        self._interval_s = interval_s
        self._families: dict[str, Any] = {}
        self._calling = threading.Lock()  # one call into the server at a time
        self._lock = threading.Lock()  # of the two below
        self._added: dict[Metric, float] = {}
        self._set: dict[Metric, float] = {}
        self._pending = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def counter(self, name: str, description: str, **labels: str) -> Metric:
        """Return a metric that `add` adds to, at 0."""
        return self._metric(self._make_family.COUNTER, name, description, labels)

    def gauge(self, name: str, description: str, **labels: str) -> Metric:
        """Return a metric that `set` sets, at 0."""
        return self._metric(self._make_family.GAUGE, name, description, labels)

    def add(self, counter: Metric, amount: float) -> None:
        """Add to `counter`, soon."""
        with self._lock:
            self._added[counter] = self._added.get(counter, 0.0) + amount
        self._pending.set()

    def set(self, gauge: Metric, value: float) -> None:
        """Set `gauge`, soon."""
        with self._lock:
            self._set[gauge] = value
        self._pending.set()

    def close(self) -> None:
        """Publish what is pending, and end the thread."""
        self._closing.set()
        self._pending.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _metric(self, kind: Any, name: str, description: str, labels: Mapping[str, str]) -> Metric:
        with self._calling:
            if name not in self._families:
                self._families[name] = self._make_family(
                    name=name, description=description, kind=kind
                )
            return self._families[name].Metric(labels={**self._labels, **labels})

    def _run(self) -> None:
        while not self._closing.is_set():
            self._pending.wait()
            self._pending.clear()
            self._publish()
            self._closing.wait(self._interval_s)
        self._publish()  # what came in that last interval

    def _publish(self) -> None:
        """Send all pending updates to the server; those that fail stay pending."""
        with self._lock:
            added, self._added = self._added, {}
            values, self._set = self._set, {}
        try:
            for counter in list(added):
                with self._calling:
                    counter.increment(added[counter])
                del added[counter]
            for gauge in list(values):
                with self._calling:
                    gauge.set(values[gauge])
                del values[gauge]
        except Exception:
            log.exception("the metrics could not be updated; they are tried again")
            with self._lock:
                for counter, amount in added.items():
                    self._added[counter] = self._added.get(counter, 0.0) + amount
                self._set = {**values, **self._set}
            self._pending.set()
