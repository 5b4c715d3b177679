"""The supervisor where two things happen at once, or what it relies on fails."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.protocol import Abort, AddRequest, Ready, Stats, ToEngine
from engine.service.stub import engine_client as client_module
from engine.service.stub.delivery import NewRequest
from engine.service.stub.engine_client import EngineClient
from engine.service.stub.engine_process import EngineProcess
from engine.service.stub.observer import Unobserved
from tests.engine.service.stub.test_delivery import Recorder
from tests.engine.service.stub.test_engine_client import (
    FAKE,
    assert_alive,
    start,
    submit,
    wait_until_ready,
)


def closes(client: EngineClient, within_s: float) -> bool:
    thread = threading.Thread(target=client.close, daemon=True)
    thread.start()
    thread.join(within_s)
    return not thread.is_alive()


def test_close_ends_a_stopped_process_that_takes_no_more_messages() -> None:
    client = start()
    os.kill(client.process_id, signal.SIGSTOP)
    too_much = NewRequest([1] * 3_000_000, {"max_tokens": 1})  # for the socket's buffer
    threading.Thread(
        target=client.submit, args=(too_much, lambda uid: Recorder()), daemon=True
    ).start()
    time.sleep(0.5)
    assert closes(client, within_s=10)


def test_close_does_not_wait_for_a_process_that_was_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    client = EngineClient(EngineConfig(model="fake"), Unobserved(), python=str(python), module=FAKE)
    python.write_text("#!/bin/sh\nexec sleep 60\n")  # the next one loads for long
    making, closing = threading.Event(), threading.Event()

    class Late(EngineProcess):
        def __init__(self, python: str | None, module: str) -> None:
            making.set()
            closing.wait()
            time.sleep(0.2)
            super().__init__(python, module)

    monkeypatch.setattr(client_module, "EngineProcess", Late)
    os.kill(client.process_id, signal.SIGKILL)
    assert making.wait(5)
    closing.set()
    assert closes(client, within_s=10)
    assert client.health.state == "closed"


def test_close_does_not_wait_for_a_process_that_loads(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    client = EngineClient(EngineConfig(model="fake"), Unobserved(), python=str(python), module=FAKE)
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    old = client.process_id
    os.kill(old, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while client.process_id == old:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert closes(client, within_s=2.5)  # less than one that is up may take to end


def test_an_abort_does_not_overtake_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the engine, which ignores what it does not know, would work for nobody."""
    client = start()
    sent: list[ToEngine] = []
    real = EngineProcess.send

    def send(process: EngineProcess, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            time.sleep(0.2)  # as a large one takes
        real(process, message)
        sent.append(message)

    monkeypatch.setattr(EngineProcess, "send", send)
    threads: list[threading.Thread] = []

    def make_sink(uid: int) -> Recorder:
        threads.append(threading.Thread(target=client.abort, args=(uid,)))
        threads[0].start()
        return Recorder()

    client.submit(NewRequest([1], {"max_tokens": 1_000_000}), make_sink)
    threads[0].join()
    assert [type(message) for message in sent] == [AddRequest, Abort]
    client.close()


def test_a_late_abort_does_not_meet_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which expects to be told first what to load."""
    client = start()
    uid, _ = submit(client, 1, 1_000_000)
    pop, first_start = client._pop, EngineProcess.start
    popped, loading = threading.Event(), threading.Event()

    def slow_pop(uid: int) -> object:
        stream = pop(uid)
        popped.set()
        loading.wait()
        return stream

    def slow_start(
        process: EngineProcess, config: EngineConfig, on_progress: Callable[[str], None]
    ) -> Ready:
        loading.set()
        aborting.join()
        return first_start(process, config, on_progress)

    monkeypatch.setattr(client, "_pop", slow_pop)
    monkeypatch.setattr(EngineProcess, "start", slow_start)
    aborting = threading.Thread(target=client.abort, args=(uid,))
    aborting.start()
    assert popped.wait(5)
    os.kill(client.process_id, signal.SIGKILL)
    assert loading.wait(5)
    monkeypatch.undo()
    wait_until_ready(client)
    assert_alive(client)
    assert client.health.num_restarts == 1
    client.close()


def test_what_cannot_be_handled_ends_requests_instead_of_losing_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Unobserved):
        broken = True

        def update(self, stats: Stats) -> None:
            if self.broken and stats.num_running:
                self.broken = False
                raise KeyError("a bug")

    client = start(observer=Broken())
    _, sink = submit(client, 1, 1_000_000)
    assert sink.ended.wait(5)
    assert isinstance(sink.error, EngineDeadError)
    assert "could not be handled" in caplog.text
    wait_until_ready(client)
    assert_alive(client)
    client.close()
