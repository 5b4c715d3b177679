"""The gateway's own metrics, and those of its servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from client.gateway.observability.server_metrics import scrape, together


class GatewayMetrics:
    """Counts requests of HTTP, by route and status.

    Args:
        servers: what there is to say of them.
        folder: where the workers of a gateway count together, which the variable
            `PROMETHEUS_MULTIPROC_DIR` must have named when this process began; None: alone.
    """

    def __init__(self, servers: Collector, folder: Path | None = None) -> None:
        self._servers = servers
        self._own = CollectorRegistry()
        self._all: Collector = self._own
        if folder is not None:
            self._all = MultiProcessCollector(None, str(folder))  # type: ignore[no-untyped-call]
        labels = ("route", "status")
        self._requests = Counter(
            "trident:gateway_requests", "Requests that ended.", labels, registry=self._own
        )
        self._seconds = Histogram(
            "trident:gateway_request_seconds",
            "From a request's head to the end of its answer.",
            ("route",),
            registry=self._own,
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
        )
        self._in_flight = Gauge(
            "trident:gateway_requests_in_flight",
            "Requests now.",
            registry=self._own,
            multiprocess_mode="livesum",
        )

    def started(self) -> None:
        """Count a request that begins."""
        self._in_flight.inc()

    def ended(self, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self._in_flight.dec()
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    async def text(self, addresses: Mapping[str, str]) -> bytes:
        """Return all in Prometheus' form: first those of the servers that answer.

        Args:
            addresses: the servers' names, and `host:port` of the metrics of each.
        """
        found = await scrape(addresses)
        texts = {server: text for server, text in found.items() if text is not None}
        up = GaugeMetricFamily(
            "trident:gateway_server_metrics_up",
            "Whether the server's metrics could be read.",
            labels=["server"],
        )
        for server in addresses:
            up.add_metric([server], server in texts)
        own = generate_latest(_Families(up, *self._servers.collect(), *self._all.collect()))
        return (together(texts).encode() if texts else b"") + own


class _Families(Collector):
    """What has been collected."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield it."""
        return iter(self._families)
