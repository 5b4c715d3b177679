"""The gateway's own metrics, and those of its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

_TIMEOUT = aiohttp.ClientTimeout(5.0)


async def scrape(addresses: Mapping[str, str]) -> dict[str, str | None]:
    """Return the metrics of each server in Prometheus' form; None of one that does not answer.

    Args:
        addresses: the server's name, and `host:port` of its metrics.
    """
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        texts = await asyncio.gather(*(_text(session, each) for each in addresses.values()))
    return dict(zip(addresses, texts, strict=True))


async def _text(session: aiohttp.ClientSession, address: str) -> str | None:
    try:
        async with session.get(f"http://{address}/metrics") as response:
            return await response.text() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


def together(texts: Mapping[str, str]) -> str:
    """Return the metrics of several servers as those of one, whose samples name their `server`.

    Each family stands there once, as Prometheus' form demands: with the help text of the first
    server that has it, and the samples of all. A single server's are left as they are.
    """
    if len(texts) == 1:
        return next(iter(texts.values()))
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for server, text in texts.items():
        label = 'server="{}"'.format(server.replace("\\", r"\\").replace('"', r"\""))
        known = frozenset(heads)
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                if family not in known:
                    heads.setdefault(family, []).append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, label))
    return "\n".join(_lines(heads, samples))


def _lines(heads: Mapping[str, list[str]], samples: Mapping[str, list[str]]) -> Iterable[str]:
    for family in dict.fromkeys((*heads, *samples)):
        yield from heads.get(family, ())
        yield from samples.get(family, ())
    yield ""  # the last line has an end too


def _labelled(sample: str, label: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"


class GatewayMetrics:
    """Counts requests of HTTP, by route and status.

    Args:
        servers: the collector of their metrics.
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
