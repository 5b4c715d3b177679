"""Engine clients whose process runs a fake engine, and what tests do with them."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.protocol.messages import Ready, Stats
from engine.service.stub.engine_client import EngineClient, Observer
from engine.service.stub.stream import NewRequest
from tests.engine.service.stub.test_stream import Recorder, ids
from tests.waiting import eventually

FAKE = "tests.engine.service.stub.fake_engine"


class Unobserved:
    """An observer that forgets."""

    def update(self, stats: Stats) -> None: ...
    def engine_up(self, ready: Ready) -> None: ...
    def engine_down(self) -> None: ...
    def engine_restarted(self) -> None: ...
    def requests_lost(self, count: int) -> None: ...
    def request_refused(self, error: Exception) -> None: ...


class Events(Unobserved):
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def engine_up(self, ready: Ready) -> None:
        self.events.append("up")

    def engine_down(self) -> None:
        self.events.append("down")

    def engine_restarted(self) -> None:
        self.events.append("restarted")

    def requests_lost(self, count: int) -> None:
        self.events.append(count)


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


def submit(
    client: EngineClient, first: int, max_tokens: int = 3, **more: Any
) -> tuple[int, Recorder]:
    sink = Recorder()
    params = {"max_tokens": max_tokens, "n": more.get("num_sequences", 1)}
    return client.submit(NewRequest([first, 0], params, **more), lambda uid: sink), sink


def tokens(sink: Recorder, index: int = 0) -> list[int]:
    chunks = [c for chunks in sink.responses for c in chunks if c.index == index]
    return [i for chunk in chunks for i in ids(chunk)]


def assert_alive(client: EngineClient) -> None:
    _, sink = submit(client, 100)
    assert sink.ended.wait(60)
    assert tokens(sink) == [100, 101, 102]


def wait_until_ready(client: EngineClient) -> None:
    assert eventually(lambda: client.health.state == "ready")


def wait_until_dead(client: EngineClient, pid: int) -> None:
    """Wait until the client has noticed that the process `pid` has gone."""
    assert eventually(lambda: client.health.state != "ready" or client.process_id != pid)


def kill(client: EngineClient, how: int = signal.SIGKILL) -> None:
    """Kill the process, and wait until the client has noticed."""
    pid = client.process_id
    os.kill(pid, how)
    wait_until_dead(client, pid)


def pause(client: EngineClient) -> None:
    """Stop the process, and wait until each of its threads has stopped."""
    os.kill(client.process_id, signal.SIGSTOP)
    tasks = Path(f"/proc/{client.process_id}/task")
    assert eventually(
        lambda: all(
            (task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
            for task in tasks.iterdir()
        )
    )
