"""Several workers behind one port: what they hold together, and what becomes of them."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from engine.launch.ports import pick_free
from tests.client.fake_triton import FakeTriton, Piece
from tests.client.gateway.asking import ask, complete
from tests.waiting import eventually

NUM_WORKERS = 2
WORDS = [f"w{i} " for i in range(40)]
SLOW = [Piece({0: word}, held=index > 0) for index, word in enumerate(WORDS)]
SLOW.append(Piece({0: ""}, finished=(0,), final=True))
KEYS = """
[few]
sha256 = ["{few}"]
requests_per_minute = 5
[brief]
sha256 = ["{brief}"]
tokens_per_minute = 15
[other]
sha256 = ["{other}"]
"""


class Gateway:
    """A gateway with several workers, in a folder for temporary files of its own."""

    def __init__(self, triton: FakeTriton, folder: Path) -> None:
        self.folder = folder
        (port,) = pick_free(1)
        self.address = f"127.0.0.1:{port}"
        names = ("few", "brief", "other")
        hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
        (folder / "keys.toml").write_text(KEYS.format(**hashes))
        command = [sys.executable, "-m", "client.cli", "gateway", "--port", str(port)]
        command += ["--workers", str(NUM_WORKERS), "--triton-url", triton.url]
        command += ["--api-key-file", str(folder / "keys.toml")]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, stderr=log, env={**os.environ, "TMPDIR": str(folder)}
            )

    @property
    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    @property
    def listening(self) -> int:
        """How many workers have started."""
        return sum(
            any(each.status == psutil.CONN_LISTEN for each in worker.net_connections())
            for worker in self.workers
        )

    def wait_until_up(self) -> None:
        assert eventually(lambda: self.listening == NUM_WORKERS, 60)

    def worker_of(self, stream: Stream) -> psutil.Process:
        """Return the worker that a stream is answered by."""
        (found,) = (
            worker
            for worker in self.workers
            if any(
                each.raddr and each.raddr.port == stream.port for each in worker.net_connections()
            )
        )
        return found

    @property
    def shared(self) -> list[Path]:
        """The folders that workers share; none are left at the end."""
        return list(self.folder.glob("trident_gateway_*"))

    def metric(self, name: str) -> float:
        text = ask(self.address, "GET", "/metrics", x_api_key="other").body.decode()
        return sum(float(each) for each in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


class Stream:
    """An answer that comes slowly."""

    def __init__(self, gateway: Gateway) -> None:
        self._connection = http.client.HTTPConnection(gateway.address, timeout=60)
        body = json.dumps({"prompt": "slow", "stream": True})
        headers = {"content-type": "application/json", "x-api-key": "other"}
        self._connection.request("POST", "/v1/completions", body, headers)
        self.port: int = self._connection.sock.getsockname()[1]
        self._answer = self._connection.getresponse()
        self._lines = [self._answer.readline()]

    def text(self) -> str:
        """Return the whole answer.

        Raises:
            http.client.HTTPException, OSError: it is cut off.
        """
        lines = [*self._lines, *self._answer.read().splitlines()]
        events = [line.removeprefix(b"data: ") for line in lines if line.strip()]
        assert events.pop() == b"[DONE]"
        return "".join(each["text"] for e in events for each in json.loads(e)["choices"])

    def close(self) -> None:
        self._connection.close()


def _started(triton: FakeTriton, folder: Path) -> Iterator[Gateway]:
    gateway = Gateway(triton, folder)
    try:
        gateway.wait_until_up()
        yield gateway
    finally:
        workers = gateway.workers if gateway.process.poll() is None else []
        gateway.process.kill()
        gateway.process.wait()
        psutil.wait_procs(workers, 30)


@pytest.fixture(scope="module")
def gateway(triton: FakeTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One for several tests: the last one ends it."""
    yield from _started(triton, tmp_path_factory.mktemp("gateway"))


@pytest.fixture
def another(triton: FakeTriton, tmp_path: Path) -> Iterator[Gateway]:
    yield from _started(triton, tmp_path)


@pytest.fixture
def go_on(triton: FakeTriton) -> Iterator[threading.Event]:
    """Answers stay at their first word until it is set."""
    triton.pieces = SLOW
    triton.go_on.clear()
    yield triton.go_on
    triton.go_on.set()


def _at_once(gateway: Gateway, key: str, count: int) -> list[int]:
    """Return the statuses of requests over connections of their own."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda _: complete(gateway.address, key).status, range(count)))


def test_requests_are_limited_together(gateway: Gateway) -> None:
    assert sorted(_at_once(gateway, "few", 16)) == [200] * 5 + [429] * 11


def test_tokens_are_limited_together(gateway: Gateway) -> None:
    """Each has a prompt of 7 and an answer of 4, by the words of its pieces."""
    statuses = [complete(gateway.address, "brief").status for _ in range(8)]
    assert statuses == [200, 200] + [429] * 6


def test_metrics_are_those_of_all(gateway: Gateway) -> None:
    name = "trident:gateway_requests_total"
    before = gateway.metric(name)
    assert _at_once(gateway, "other", 20) == [200] * 20
    assert eventually(lambda: gateway.metric("trident:gateway_requests_in_flight") == 1)
    assert gateway.metric(name) - before >= 20
    text = ask(gateway.address, "GET", "/metrics", x_api_key="other").body.decode()
    assert len(re.findall(r"^# TYPE trident:gateway_requests_total counter$", text, re.M)) == 1


def test_what_is_stored_is_seen_by_all_workers_and_by_its_tenant_alone(gateway: Gateway) -> None:
    body = {"input": "a", "store": True}
    made = ask(gateway.address, "POST", "/v1/responses", body, x_api_key="other")
    path = f"/v1/responses/{json.loads(made.body)['id']}"
    for key, status in (("other", 200), ("few", 404)):
        for route in (path, f"{path}/input_items"):
            with ThreadPoolExecutor(20) as threads:
                replies = threads.map(
                    lambda _, key=key, route=route: ask(
                        gateway.address, "GET", route, x_api_key=key
                    ),
                    range(20),
                )
                assert {reply.status for reply in replies} == {status}
    body = {"input": "b", "previous_response_id": path.rpartition("/")[2]}
    reply = ask(gateway.address, "POST", "/v1/responses", body, x_api_key="brief")
    assert reply.status in (400, 429)
    assert ask(gateway.address, "DELETE", path, x_api_key="brief").status in (404, 429)
    assert ask(gateway.address, "GET", path, x_api_key="other").body == made.body


def test_killing_one_ends_its_streams_alone(gateway: Gateway, go_on: threading.Event) -> None:
    streams: list[Stream] = []
    while len({gateway.worker_of(stream) for stream in streams}) < NUM_WORKERS:
        assert len(streams) < 100, "all come to the same worker"
        streams.append(Stream(gateway))
    lost = gateway.worker_of(streams[-1])
    survive = [stream for stream in streams if gateway.worker_of(stream) != lost]
    ends = [stream for stream in streams if stream not in survive]
    lost.kill()
    for stream in ends:
        with pytest.raises((http.client.HTTPException, OSError)):
            stream.text()
    go_on.set()
    assert [stream.text() for stream in survive] == ["".join(WORDS)] * len(survive)
    assert eventually(lambda: gateway.listening == NUM_WORKERS, 60)
    assert lost not in gateway.workers
    later = Stream(gateway)
    assert later.text() == "".join(WORDS)
    # What the lost one had in flight is not counted for ever.
    assert eventually(lambda: gateway.metric("trident:gateway_requests_in_flight") == 1)
    for stream in (*streams, later):
        stream.close()
    assert "worker " in (gateway.folder / "log").read_text()


@pytest.mark.parametrize(
    ("fixture", "number"), [("gateway", signal.SIGTERM), ("another", signal.SIGKILL)]
)
def test_no_stream_is_lost_at_the_end(
    request: pytest.FixtureRequest, go_on: threading.Event, fixture: str, number: signal.Signals
) -> None:
    """Also not if the supervisor is killed: its workers end as if it had told them."""
    gateway: Gateway = request.getfixturevalue(fixture)
    streams = [Stream(gateway) for _ in range(4)]
    workers = gateway.workers
    assert len(gateway.shared) == 1
    gateway.process.send_signal(number)
    assert eventually(lambda: not _is_open(gateway.address))
    go_on.set()
    assert [stream.text() for stream in streams] == ["".join(WORDS)] * len(streams)
    assert gateway.process.wait(60) == -number
    assert not psutil.wait_procs(workers, 60)[1]
    assert not gateway.shared
    for stream in streams:
        stream.close()


@pytest.mark.usefixtures("go_on")
def test_a_second_interrupt_waits_for_no_stream(another: Gateway) -> None:
    stream = Stream(another)
    workers = another.workers
    for _ in range(2):
        another.process.send_signal(signal.SIGINT)
        assert eventually(lambda: not _is_open(another.address))
    assert another.process.wait(60) == 130
    assert not psutil.wait_procs(workers, 60)[1]
    stream.close()


def _is_open(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=1)
    try:
        connection.connect()
    except OSError:
        return False
    connection.close()
    return True
