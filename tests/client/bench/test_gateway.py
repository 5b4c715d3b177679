"""`trident bench gateway` without a server: its readers, its figures, its table."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from threading import Thread

import pytest
from rich.console import Console

from client.bench.errors import BenchError
from client.bench.gateway.benchmark import Round, row, table
from client.bench.gateway.fronts import Front, GatewayFront, GrpcFront
from client.bench.gateway.sse import SseConnection
from client.bench.gateway.stream_reader import read_streams
from client.bench.load.prompts import Prompt
from client.bench.measurement import Wave
from client.bench.report import Spread
from client.bench.waves import Trace
from client.bench.workload import Workload
from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import FakeTriton, Piece
from tests.server.gateway.running import running

PIECES = [
    Piece({0: "a b"}),
    Piece({0: "c"}, delay_s=0.2),
    Piece({0: "d " * 10_000}, finished=(0,), final=True),
]


@pytest.fixture(params=["grpc", "gateway"])
def front(request: pytest.FixtureRequest, triton: FakeTriton) -> Iterator[Front]:
    triton.pieces = PIECES
    if request.param == "grpc":
        yield GrpcFront(triton.url, "ensemble")
        return
    with running(GatewaySettings((triton.url,))) as address:
        host, _, port = address.rpartition(":")
        yield GatewayFront(host, int(port))


def _ask(front: Front, count: int) -> list[Trace]:
    prompts = [Prompt(f"question {i}", [1]) for i in range(count)]
    size = front.per_connection
    groups = [prompts[first : first + size] for first in range(0, count, size)]
    connections = [front.connection(group, Workload(max_tokens=9).sampling) for group in groups]
    try:
        arrivals = read_streams(connections, [len(group) for group in groups], front.is_last)
    finally:
        for connection in connections:
            connection.close()
    return [front.trace(each) for each in arrivals]


def test_both_fronts_are_read_to_their_end(front: Front, triton: FakeTriton) -> None:
    traces = _ask(front, 5)
    assert [trace.num_tokens for trace in traces] == [2 + 1 + 10_000] * 5
    for trace in traces:
        first, second, *_ = trace.arrivals
        assert second - first > 0.1
    assert {each["text_input"] for each in triton.requests} == {f"question {i}" for i in range(5)}
    assert {each["sampling_parameters"]["max_tokens"] for each in triton.requests} == {9}


def test_a_failure_is_an_error_with_the_servers_text(front: Front, triton: FakeTriton) -> None:
    triton.pieces, triton.error_message = [], "temperature: no such luck"
    with pytest.raises(BenchError, match="temperature: no such luck"):
        _ask(front, 1)
    triton.pieces, triton.error_message = [Piece({0: "a"})], "the model failed"
    with pytest.raises(BenchError, match="the model failed"):
        _ask(front, 1)


def test_a_connection_that_ends_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n2\r\ndata: {}\n\n")

        thread = Thread(target=answer)
        thread.start()
        connection = SseConnection("127.0.0.1", listener.getsockname()[1], "/", {})
        with pytest.raises(BenchError, match="ended a request without its answer"):
            read_streams([connection], [1], lambda _: False)
        thread.join()
        connection.close()


def _wave(tokens_per_second: float, ttft: float) -> Wave:
    cpu = {"gateway": 0.5, "tritonserver": 1.0}
    return Wave(2, 1000, 1000 / tokens_per_second, cpu, ttfts=[ttft, ttft], num_responses=10)


def test_figures_and_table() -> None:
    rounds = [
        Round(grpc=[_wave(100, 0.01)], gateway=[_wave(50, 0.02)]),
        Round(grpc=[_wave(200, 0.03)], gateway=[_wave(180, 0.04)]),
    ]
    found = row(2, rounds)
    assert found.ratio == Spread(pytest.approx(0.7), 0.5, pytest.approx(0.9))
    assert found.gateway == Spread(115, 50, 180)
    assert (found.grpc_ttft, found.gateway_ttft) == pytest.approx((0.02, 0.03))
    assert found.gateway_cpu == 0.5
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table([found]))
    text = console.export_text()
    assert "…" not in text
    for cell in ("150", "115", "0.70", "20.0", "30.0", "0.500"):
        assert f" {cell} " in text
