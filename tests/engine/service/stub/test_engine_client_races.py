"""The supervisor where two things happen at once, or what it relies on fails."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import EngineDeadError, QueueFullError
from engine.protocol.messages import Abort, AddRequest, Chunk, Ready, Stats, ToEngine
from engine.service.stub import supervisor as supervisor_module
from engine.service.stub.engine_client import EngineClient
from engine.service.stub.engine_process import EngineProcess
from engine.service.stub.stream import NewRequest, RequestStream
from tests.engine.service.stub.clients import (
    FAKE,
    Unobserved,
    assert_alive,
    pause,
    start,
    submit,
    wait_until_ready,
)
from tests.engine.service.stub.test_stream import Recorder
from tests.waiting import eventually


def closes(client: EngineClient, within_s: float) -> bool:
    thread = threading.Thread(target=client.close, daemon=True)
    thread.start()
    thread.join(within_s)
    return not thread.is_alive()


def test_close_ends_a_stopped_process_that_takes_no_more_messages() -> None:
    client = start()
    pause(client)
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

    monkeypatch.setattr(supervisor_module, "EngineProcess", Late)
    os.kill(client.process_id, signal.SIGKILL)
    assert making.wait(60)
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
    assert eventually(lambda: client.process_id != old)
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
    send_abort, first_start = client._send_abort, EngineProcess.start
    aborted, loading = threading.Event(), threading.Event()

    def slow_send_abort(stream: RequestStream) -> None:
        aborted.set()
        loading.wait()
        send_abort(stream)

    def slow_start(
        process: EngineProcess, config: EngineConfig, on_progress: Callable[[str], None]
    ) -> Ready:
        loading.set()
        aborting.join()
        return first_start(process, config, on_progress)

    monkeypatch.setattr(client, "_send_abort", slow_send_abort)
    monkeypatch.setattr(EngineProcess, "start", slow_start)
    aborting = threading.Thread(target=client.abort, args=(uid,))
    aborting.start()
    assert aborted.wait(60)
    os.kill(client.process_id, signal.SIGKILL)
    assert loading.wait(60)
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
    assert sink.ended.wait(60)
    assert isinstance(sink.error, EngineDeadError)
    assert "could not be handled" in caplog.text
    wait_until_ready(client)
    assert_alive(client)
    client.close()


def test_a_cancelled_request_counts_until_the_process_has_let_it_go() -> None:
    """Or a client that cancels what it sends could fill the memory of a process that is busy."""
    client = start(max_num_seqs=2, max_num_queued_reqs=3)
    pause(client)
    sinks = []
    for _ in range(5):
        uid, sink = submit(client, 1, 1_000_000)
        client.abort(uid)
        sinks.append(sink)
    assert all(sink.ended.wait(60) for sink in sinks)  # their clients need not wait for that
    with pytest.raises(QueueFullError, match="Maximum queue size of 3 requests"):
        submit(client, 1)
    os.kill(client.process_id, signal.SIGCONT)
    assert eventually(lambda: client.health.num_in_flight == 0)
    assert_alive(client)
    client.close()


def test_a_request_is_told_to_end_once_however_often_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = start()
    sent: list[ToEngine] = []
    real = EngineProcess.send

    def send(process: EngineProcess, message: ToEngine) -> None:
        sent.append(message)
        real(process, message)

    monkeypatch.setattr(EngineProcess, "send", send)
    pause(client)
    uid, sink = submit(client, 1, 1_000_000, request_id="mine")
    for _ in range(100):
        client.stop("mine")
    client.abort(uid)
    assert [type(message) for message in sent] == [AddRequest, Abort]
    os.kill(client.process_id, signal.SIGCONT)
    assert sink.ended.wait(60)
    client.close()


def test_a_stopped_request_that_was_never_taken_ends_with_abort() -> None:
    client = start()
    pause(client)
    _, sink = submit(client, 1, 1_000_000, request_id="mine", num_sequences=2)
    assert client.stop("mine") == 1
    os.kill(client.process_id, signal.SIGCONT)
    assert sink.ended.wait(60)
    assert sink.error is None
    assert [chunk.details.finish_reason for chunk in sink.responses[-1]] == ["abort", "abort"]
    client.close()


def test_whatever_goes_wrong_while_a_request_is_sent_ends_it_and_counts_it_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = start(max_num_seqs=1, max_num_queued_reqs=1)

    def no_sink(uid: int) -> Recorder:
        raise KeyError("a bug")

    for _ in range(5):
        with pytest.raises(KeyError):
            client.submit(NewRequest([1], {"max_tokens": 1}), no_sink)
    with monkeypatch.context() as patch:
        patch.setattr(EngineProcess, "send", lambda process, message: 1 / 0)
        for _ in range(5):
            _, sink = submit(client, 1)
            assert sink.ended.wait(60)
            assert str(sink.error) == "internal error"
    assert client.health.num_in_flight == 0
    assert "could not be sent" in caplog.text
    assert_alive(client)
    client.close()


def test_each_end_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trident.request")

    class Refusals(Unobserved):
        seen: ClassVar[list[Exception]] = []

        def request_refused(self, error: Exception) -> None:
            self.seen.append(error)

    class Broken(Recorder):
        def send(self, chunks: list[Chunk], *, last: bool) -> None:
            raise ValueError("cannot be encoded")

    client = start(observer=Refusals())
    broken = Broken()
    client.submit(NewRequest([1], {"max_tokens": 1_000_000}), lambda uid: broken)
    assert broken.ended.wait(60)  # its client does not wait for ever
    assert eventually(
        lambda: client.health.num_in_flight == 0
    )  # nor does the engine work for nobody
    cancelled, _ = submit(client, 1, 1_000_000)
    client.abort(cancelled)
    assert_alive(client)
    client.close()
    assert [str(error) for error in Refusals.seen] == ["internal error"]
    events = sorted(r.getMessage() for r in caplog.records if r.name == "trident.request")
    assert events == ["request cancelled", "request finished", "request refused"]


def test_a_burst_that_fits_into_free_slots_is_not_refused() -> None:
    client = start(max_num_seqs=64, max_num_queued_reqs=4)
    sinks = [submit(client, 10 * i, 50)[1] for i in range(64)]
    assert all(sink.ended.wait(30) for sink in sinks)
    assert {sink.error for sink in sinks} == {None}
    client.close()
