"""The gateway's own metrics, and those of its server."""

from __future__ import annotations

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

_SCRAPE_TIMEOUT_S = 5.0


class GatewayMetrics:
    """Counts requests of HTTP, by route and status.

    Args:
        servers: what there is to say of them.
    """

    def __init__(self, servers: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(servers)
        labels = ("route", "status")
        self._requests = Counter(
            "trident:gateway_requests", "Requests that ended.", labels, registry=self._registry
        )
        self._seconds = Histogram(
            "trident:gateway_request_seconds",
            "From a request's head to the end of its answer.",
            ("route",),
            registry=self._registry,
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
        )
        self._in_flight = Gauge(
            "trident:gateway_requests_in_flight", "Requests now.", registry=self._registry
        )
        self._server_up = Gauge(
            "trident:gateway_server_metrics_up",
            "Whether the server's metrics could be read.",
            registry=self._registry,
        )

    def started(self) -> None:
        """Count a request that begins."""
        self._in_flight.inc()

    def ended(self, route: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self._in_flight.dec()
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    async def text(self, server: str | None) -> bytes:
        """Return all in Prometheus' form: those of `server` (`host:port`) first, if it answers."""
        found = None if server is None else await _scrape(server)
        self._server_up.set(found is not None)
        return (found or b"") + generate_latest(self._registry)


async def _scrape(server: str) -> bytes | None:
    try:
        timeout = aiohttp.ClientTimeout(_SCRAPE_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"http://{server}/metrics") as response,
        ):
            return await response.read() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None
