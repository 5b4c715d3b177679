"""Metrics of several servers as those of one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from client.errors import ConfigurationError
from client.gateway.observability.metrics import GatewayMetrics, together
from client.gateway.settings import GatewaySettings
from engine.launch.ports import pick_free

FIRST = """\
# HELP nv_inference_count Number of inferences
# TYPE nv_inference_count counter
nv_inference_count{model="a{b}",version="1"} 3
# HELP up Is it
# TYPE up gauge
up 1
# HELP seconds Some
# TYPE seconds histogram
seconds_bucket{le="0.5"} 1
seconds_bucket{le="+Inf"} 2
seconds_sum 0.75
seconds_count 2
"""
SECOND = """\
# HELP seconds Some
# TYPE seconds histogram
seconds_bucket{le="0.5"} 0
seconds_bucket{le="+Inf"} 1
seconds_sum 4
seconds_count 1
# HELP nv_inference_count Number of inferences
# TYPE nv_inference_count counter
nv_inference_count{} 5

# HELP new Only here
# TYPE new gauge
new 7"""


def _samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_sample_names_its_server() -> None:
    merged = together({"a:1": FIRST, 'b"\\': SECOND})
    expected = {
        (name, tuple(sorted([*labels, ("server", server)]))): value
        for server, text in (("a:1", FIRST), ('b"\\', SECOND))
        for (name, labels), value in _samples(text).items()
    }
    assert len(expected) == 6 + 6
    assert _samples(merged) == expected
    assert merged.endswith("\n")


def test_every_family_is_there_once_and_whole() -> None:
    lines = together({"a:1": FIRST, "b:1": SECOND}).splitlines()
    types = [line.split()[2:] for line in lines if line.startswith("# TYPE ")]
    assert types == [
        ["nv_inference_count", "counter"],
        ["up", "gauge"],
        ["seconds", "histogram"],
        ["new", "gauge"],
    ]
    start = lines.index("# TYPE seconds histogram")
    assert all(line.startswith("seconds_") for line in lines[start + 1 : start + 9])


def test_one_servers_are_left_as_they_are() -> None:
    assert together({"a:1": FIRST}) == FIRST


@contextmanager
def _shown(text: str) -> Iterator[str]:
    """Show `text` as metrics at `host:port`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_who_does_not_answer_is_told() -> None:
    with ExitStack() as stack:
        addresses = {
            "a:1": stack.enter_context(_shown(FIRST)),
            "b:1": stack.enter_context(_shown(SECOND)),
            "c:1": f"127.0.0.1:{pick_free(1)[0]}",
        }
        metrics = GatewayMetrics(CollectorRegistry())
        metrics.started()
        found = _samples(asyncio.run(metrics.text(addresses)).decode())
    up = "trident:gateway_server_metrics_up"
    assert {labels: value for (name, labels), value in found.items() if name == up} == {
        (("server", "a:1"),): 1,
        (("server", "b:1"),): 1,
        (("server", "c:1"),): 0,
    }
    assert found["seconds_sum", (("server", "b:1"),)] == 4
    assert found["trident:gateway_requests_in_flight", ()] == 1


@pytest.mark.parametrize("metrics", [("a:3",), ("a:3", "b:3", "c:3")])
def test_there_is_one_address_for_each_server(metrics: tuple[str, ...]) -> None:
    with pytest.raises(
        ConfigurationError, match="triton_metrics_url: must be one address for each"
    ):
        GatewaySettings(("a:1", "b:1"), metrics_urls=metrics)
