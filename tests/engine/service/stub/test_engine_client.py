"""The engine process and its supervisor, with real processes and a fake engine in them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    EngineDeadError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    SuspectRequestError,
    TridentError,
)
from engine.protocol import Stats
from engine.service import channel
from engine.service.stub.engine_client import EngineClient, Observer
from engine.service.stub.stream import NewRequest
from tests.engine.service.stub.fake_engine import (
    BAD_REQUEST,
    BUG,
    DIES,
    FULL,
    HANGS,
    HANGS_IN_ABORT,
    HANGS_IN_ADD,
    HANGS_IN_STATS,
    HANGS_WHEN_IDLE,
    STEP_FAILS,
)
from tests.engine.service.stub.test_stream import Recorder

FAKE = "tests.engine.service.stub.fake_engine"


class Unobserved:
    """An observer that forgets."""

    def update(self, stats: Stats) -> None: ...
    def engine_up(self, up: bool) -> None: ...
    def engine_restarted(self) -> None: ...
    def requests_lost(self, count: int) -> None: ...
    def request_refused(self, error: Exception) -> None: ...


def start(
    model: str = "fake",
    said: list[str] | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> EngineClient:
    progress = [] if said is None else said
    config = EngineConfig(model=model, **settings)
    observer = observer or Unobserved()
    return EngineClient(config, observer, progress.append, python=sys.executable, module=FAKE)


@pytest.fixture
def client() -> Iterator[EngineClient]:
    client = start()
    yield client
    client.close()


def submit(
    client: EngineClient, first: int, max_tokens: int = 3, **more: Any
) -> tuple[int, Recorder]:
    sink = Recorder()
    params = {"max_tokens": max_tokens, "n": more.get("num_sequences", 1)}
    return client.submit(NewRequest([first, 0], params, **more), lambda uid: sink), sink


def tokens(sink: Recorder, index: int = 0) -> list[int]:
    chunks = [c for chunks in sink.responses for c in chunks if c.index == index]
    return [i for chunk in chunks for i in chunk.token_ids]


def assert_alive(client: EngineClient) -> None:
    _, sink = submit(client, 100)
    assert sink.ended.wait(5)
    assert tokens(sink) == [100, 101, 102]


def test_requests_are_answered_side_by_side(client: EngineClient) -> None:
    sinks = [submit(client, 100 * i, 20, num_sequences=2)[1] for i in range(1, 9)]
    assert all(sink.ended.wait(10) for sink in sinks)
    for i, sink in enumerate(sinks, start=1):
        assert tokens(sink, 0) == [100 * i + k for k in range(20)]
        assert tokens(sink, 1) == [100 * i + 1 + k for k in range(20)]


def test_it_reports_how_it_starts() -> None:
    said: list[str] = []
    client = start(said=said)
    assert said == ["pretending to load", "a fake"]
    assert client.ready.max_model_len == 512
    client.close()
    client.close()


@pytest.mark.parametrize(
    ("first", "kind", "text"),
    [
        (BAD_REQUEST, RequestError, "input_ids: is bad"),
        (FULL, QueueFullError, "Maximum queue size of 0 requests reached"),
        (BUG, TridentError, "internal error"),
    ],
)
def test_what_is_wrong_with_a_request_ends_only_it(
    client: EngineClient, first: int, kind: type[TridentError], text: str
) -> None:
    _, other = submit(client, 1000, 100)
    _, sink = submit(client, first)
    assert sink.ended.wait(5)
    assert type(sink.error) is kind
    assert str(sink.error) == text
    assert other.ended.wait(5)
    assert tokens(other) == list(range(1000, 1100))


def test_a_request_that_is_too_large_is_refused(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(channel, "MAX_FRAME_BYTES", 10)
        _, sink = submit(client, 1)
    _, other = submit(client, 1, max_tokens=2**64)
    for refused in (sink, other):
        assert refused.ended.wait(5)
        assert isinstance(refused.error, RequestError)
        assert "too large" in str(refused.error)
    assert_alive(client)


def test_abort_ends_a_request_at_once(client: EngineClient) -> None:
    uid, sink = submit(client, 1, 1_000_000)
    client.abort(uid)
    client.abort(uid)
    client.abort(424242)
    assert sink.ended.wait(5)
    assert isinstance(sink.error, RequestCancelledError)
    assert_alive(client)


@pytest.mark.parametrize("first", [STEP_FAILS, DIES])
def test_when_the_process_dies_everybody_hears_of_it(client: EngineClient, first: int) -> None:
    sinks = [submit(client, i, 1_000_000)[1] for i in (1, 2, first)]
    assert all(sink.ended.wait(5) for sink in sinks)
    for sink in sinks:
        assert isinstance(sink.error, EngineDeadError)
        assert sink.error.code == "UNAVAILABLE"
        assert str(sink.error) == "the engine process has died; the request is lost"


def wait_for(condition: Callable[[], bool], timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_until_ready(client: EngineClient) -> None:
    wait_for(lambda: client.health.state == "ready")


def wait_until_dead(client: EngineClient, pid: int) -> None:
    """Wait until the client has noticed that the process `pid` has gone."""
    wait_for(lambda: client.health.state != "ready" or client.process_id != pid)


def kill(client: EngineClient, how: int = signal.SIGKILL) -> None:
    """Kill the process, and wait until the client has noticed."""
    pid = client.process_id
    os.kill(pid, how)
    wait_until_dead(client, pid)


class Events(Unobserved):
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def engine_up(self, up: bool) -> None:
        self.events.append(up)

    def engine_restarted(self) -> None:
        self.events.append("restarted")

    def requests_lost(self, count: int) -> None:
        self.events.append(count)


def test_a_dead_process_is_started_again_in_the_background() -> None:
    observer = Events()
    client = start(observer=observer)
    _, sink = submit(client, 1, 1_000_000)
    pid = client.process_id
    kill(client)
    with pytest.raises(EngineDeadError, match="the engine process"):
        submit(client, 1)
    with pytest.raises(EngineDeadError, match="the engine process"):
        client.check_ready()
    assert sink.ended.wait(5)
    wait_until_ready(client)
    assert client.process_id != pid
    assert client.health.num_restarts == 1
    assert client.health.num_in_flight == 0
    assert_alive(client)
    assert observer.events == [True, False, 1, True, "restarted"]
    client.close()
    assert client.health.state == "closed"


def test_what_keeps_it_from_starting_again_is_for_the_log_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = EngineConfig(model="fake")
    client = EngineClient(config, Unobserved(), python=str(python), module=FAKE)
    python.unlink()
    kill(client)
    deadline = time.monotonic() + 10
    while "could not be started" not in client.health.detail:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(
        EngineDeadError,
        match=r"^the engine process could not be started again; another one is being started, try",
    ):
        submit(client, 1)
    assert str(tmp_path) in caplog.text
    client.close()


def test_it_says_why_the_process_died(
    client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    kill(client, signal.SIGKILL)
    wait_until_ready(client)
    kill(client, signal.SIGSEGV)
    wait_until_ready(client)
    pid = client.process_id
    submit(client, DIES)
    wait_until_dead(client, pid)
    wait_until_ready(client)
    said = [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
    assert said == [
        "the engine process was killed by SIGKILL; starting it again in 0 s",
        "the engine process was killed by SIGSEGV; starting it again in 0.5 s",
        "the engine process ended with status 9; its log says why; starting it again in 1 s",
    ]


def test_a_stopped_process_is_noticed_and_replaced() -> None:
    client = start(heartbeat_timeout_s=2)
    _, sink = submit(client, 1, 1_000_000)
    time.sleep(0.1)
    pid = client.process_id
    os.kill(pid, signal.SIGSTOP)
    assert sink.ended.wait(6)
    assert isinstance(sink.error, EngineDeadError)
    wait_until_ready(client)
    assert client.process_id != pid
    assert not Path(f"/proc/{pid}").exists()
    assert_alive(client)
    client.close()


@pytest.mark.parametrize(
    "kind", [HANGS, HANGS_IN_ADD, HANGS_IN_ABORT, HANGS_WHEN_IDLE, HANGS_IN_STATS]
)
def test_an_engine_that_hangs_anywhere_in_its_loop_is_noticed(kind: int) -> None:
    client = start(step_timeout_s=0.5)
    pid = client.process_id
    uid, sink = submit(client, kind, 1_000_000 if kind == HANGS_IN_ABORT else 1)
    if kind == HANGS_IN_ABORT:
        wait_for(lambda: bool(sink.responses))
        client.abort(uid)
    wait_for(lambda: client.process_id != pid, 20)
    assert sink.ended.wait(20)
    wait_until_ready(client)
    assert_alive(client)
    client.close()


def test_an_engine_that_waits_for_requests_does_not_hang() -> None:
    client = start(step_timeout_s=0.1)
    time.sleep(1.5)  # several heartbeats
    assert_alive(client)
    assert client.health.num_restarts == 0
    client.close()


def test_a_request_that_kills_the_engine_twice_is_refused(client: EngineClient) -> None:
    for _ in range(2):
        _, sink = submit(client, DIES)
        assert sink.ended.wait(5)
        assert isinstance(sink.error, EngineDeadError)
        wait_until_ready(client)
    with pytest.raises(SuspectRequestError, match="the engine died each of the 2 times"):
        submit(client, DIES)
    assert_alive(client)
    assert client.health.num_restarts == 2


def test_bystanders_are_not_suspected(client: EngineClient) -> None:
    for how in (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL):  # somebody's hand, not theirs
        _, sink = submit(client, 5, 1_000_000)
        kill(client, how)
        assert sink.ended.wait(5)
        wait_until_ready(client)
    submit(client, 5, 1_000_000)
    kill(client, signal.SIGSEGV)
    wait_until_ready(client)
    _, bystander = submit(client, 5, 10)  # with another max_tokens it is another request
    assert bystander.ended.wait(5)


def test_a_request_that_finishes_is_cleared(client: EngineClient) -> None:
    slow = 300  # tokens at about 1 ms each
    for _ in range(3):
        submit(client, 5, slow)
        kill(client, signal.SIGSEGV)
        wait_until_ready(client)
        _, sink = submit(client, 5, slow)
        assert sink.ended.wait(5)
        assert sink.error is None


def test_stop_ends_requests_by_their_id(client: EngineClient) -> None:
    stopped = [submit(client, i, 1_000_000, request_id="a")[1] for i in (1, 2)]
    other = submit(client, 3, 100, request_id="b")[1]
    time.sleep(0.05)
    assert client.stop("a") == 2
    assert client.stop("nobody's") == 0
    for sink in stopped:
        assert sink.ended.wait(5)
        assert sink.error is None
        assert sink.responses[-1][0].finish_reason == "abort"
        assert tokens(sink) == list(range(tokens(sink)[0], tokens(sink)[0] + len(tokens(sink))))
    assert other.ended.wait(5)
    assert len(tokens(other)) == 100


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        ("broken", RequestError, "^model.safetensors: is missing$"),
        ("bug", TridentError, "ZeroDivisionError: oops"),
        ("crash", EngineDeadError, "status 7"),
    ],
)
def test_a_failed_start_says_why(model: str, kind: type[TridentError], text: str) -> None:
    with pytest.raises(kind, match=text):
        start(model)


def test_an_interpreter_that_does_not_exist_says_so() -> None:
    with pytest.raises(ConfigError, match="python-of-nowhere"):
        EngineClient(EngineConfig(), Unobserved(), python="python-of-nowhere")


def test_close_ends_even_a_process_that_hangs(client: EngineClient) -> None:
    _, sink = submit(client, HANGS)
    time.sleep(0.1)
    client.close()
    assert isinstance(sink.error, EngineDeadError)


def test_the_process_ends_with_its_parent_even_inside_a_step(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from tests.engine.service.stub.test_engine_client import HANGS, start, submit\n"
        "client = start()\n"
        "submit(client, HANGS)\n"
        "time.sleep(0.1)\n"
        "print(client.process_id, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGINT)  # Ctrl-C is not for the engine process
        time.sleep(0.1)
        os.kill(child, 0)
        parent.kill()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":  # it has ended, though nobody here reaps orphans
            return
        time.sleep(0.05)
    pytest.fail("the engine process outlived its parent")
