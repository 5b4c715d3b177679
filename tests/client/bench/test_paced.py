"""`trident bench stages --device null:MS` without a server: its reader of gRPC, and its figures."""

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from rich.console import Console
from typer.testing import CliRunner

from client import cli
from client.bench.cpu import CLIENT, OTHERS, STOLEN
from client.bench.errors import BenchError
from client.bench.paced_figures import cpu_table, figures, gap_percentiles, limits, rate_table
from client.bench.paced_generator import Generator, run_wait_s
from client.bench.paced_worker import Streams, tokens
from client.request import completion
from tests.client.fake_triton import FakeTriton, Piece


def requests(count: int, size: int = 10) -> list[bytes]:
    asked = completion("a" * size, None, {}, priority=0, request_id="")
    return [asked.message(batched=True, timeout=None).SerializeToString()] * count


@pytest.fixture
def stop_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of a pipe in place of stdin."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield writing
    os.close(writing)


class TestGenerator:
    def test_reads_all_that_many_streams_are_sent(self, triton: FakeTriton, stop_line: int) -> None:
        """Answers larger than a frame and than a window, requests larger than a window together."""
        triton.pieces = [Piece({0: "x y"}), Piece({0: "z " * 100_000}), Piece({0: "a"}, (0,), True)]
        host, port = triton.url.split(":")
        streams = Streams(host, int(port), requests(8, size=20_000), per_connection=5)
        answered = threading.Event()

        def end() -> None:
            answered.set()
            # The servers of the other streams may still be at it.
            threading.Timer(1.0, os.write, (stop_line, b"stop\n")).start()

        with closing(streams):
            found = tokens(streams.run(end))
        assert answered.is_set()
        by_stream = {
            stream: [each[2:] for each in found if each[0] == stream] for stream in range(8)
        }
        expected = [(2, False), (100_000, False), (1, True)]
        assert by_stream == dict.fromkeys(range(8), expected)
        assert [at for _, at, _, _ in found] == sorted(at for _, at, _, _ in found)
        assert {len(call.inputs["text_input"]) for call in triton.calls} == {20_000}

    def test_a_failed_request_is_an_error_with_the_servers_text(self, triton: FakeTriton) -> None:
        triton.pieces, triton.error_message = [], "no such luck"
        host, port = triton.url.split(":")
        with Generator(host, int(port), requests(2)) as generator:
            generator.wait_until_answered()
            assert run_wait_s(generator.pid) >= 0
            with pytest.raises(BenchError, match="no such luck"):
                generator.stop()

    def test_a_request_that_is_never_answered_is_an_error(self, triton: FakeTriton) -> None:
        triton.pieces = []
        host, port = triton.url.split(":")
        with Generator(host, int(port), requests(2)) as generator:
            generator.wait_until_answered()
            with pytest.raises(BenchError, match="without its answer"):
                generator.stop()

    def test_a_server_that_goes_is_an_error(self, triton: FakeTriton) -> None:
        with (
            Generator("127.0.0.1", 9, requests(1)) as generator,
            pytest.raises(BenchError, match="refused"),
        ):
            generator.wait_until_answered()

    def test_a_request_that_is_too_large_is_refused(self, triton: FakeTriton) -> None:
        host, port = triton.url.split(":")
        with (
            Generator(host, int(port), requests(1, size=70_000)) as generator,
            pytest.raises(BenchError, match=r"70\d+ bytes is too large"),
        ):
            generator.wait_until_answered()


class TestFigures:
    def test_a_pause_counts_for_every_moment_in_it(self) -> None:
        # 1 s of a response every 10 ms, and a pause of 1 s: half of the tokens were due in it.
        arrivals = [(0, 10 + i / 100, 1, False) for i in range(101)]
        arrivals.append((0, 12.0, 1, False))
        p40, p60 = gap_percentiles(arrivals, 1, 10.0, 12.0, (40, 60))
        assert (p40, p60) == (pytest.approx(0.01), pytest.approx(1.0))

    def test_a_pause_that_does_not_end_counts_too(self) -> None:
        arrivals = [
            (0, 9.0, 1, False),
            (1, 9.9, 1, False),
            (1, 19.99, 5, False),
            (0, 30.0, 1, False),
        ]
        p1, p99 = gap_percentiles(arrivals, 2, 10.0, 20.0, (1, 99))
        assert p1 == pytest.approx(10.09)  # half of it lies in the window, and the whole counts
        assert p99 == pytest.approx(11.0)

    def test_summary(self) -> None:
        arrivals = [(s, 10 + i / 10 + s / 100, 4, False) for i in range(-5, 20) for s in range(2)]
        cpu = {"tritonserver": 0.4, CLIENT: 0.1, OTHERS: 0.2, STOLEN: 0.1}
        found = figures(arrivals, 2, 10.0, 11.0, step_s=0.02, cpu=cpu, generator_waited=0.75)
        assert found.intended == 100
        assert found.tokens_per_second == pytest.approx(80)
        assert found.tokens_per_response == 4
        assert found.gap == (pytest.approx(0.1), pytest.approx(0.1))
        assert found.cpu_per_1000_tokens == {"tritonserver": 5.0, CLIENT: pytest.approx(1.25)}
        assert found.cpu_per_response == {"tritonserver": 0.02, CLIENT: 0.005}
        assert found.cores_used == pytest.approx(0.8)
        (text,) = limits([found])
        assert text.startswith("2 streams: the load generator used 10% of a core and waited")
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(rate_table([found] * 3))
        console.print(cpu_table([found] * 3))
        assert "…" not in console.export_text()

    def test_nothing_is_an_error(self) -> None:
        with pytest.raises(BenchError, match="nothing arrived"):
            figures([], 1, 0.0, 1.0, step_s=0.01, cpu={CLIENT: 0.0}, generator_waited=0)


@pytest.mark.parametrize(
    ("device", "message"), [("null", "--device: give the milliseconds"), ("null:x", "device: must")]
)
def test_a_device_without_a_pace_is_refused(device: str, message: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "stages", "--device", device])
    assert message in str(result.exception)
