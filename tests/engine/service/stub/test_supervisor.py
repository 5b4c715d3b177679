"""An engine process that dies or hangs: it is noticed, reported and replaced."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import EngineDeadError, SuspectRequestError
from engine.service.stub.engine_client import EngineClient
from tests.engine.service.stub.clients import (
    FAKE,
    Events,
    Unobserved,
    assert_alive,
    kill,
    start,
    submit,
    wait_until_dead,
    wait_until_ready,
)
from tests.engine.service.stub.fake_engine import (
    A_RANK_FAILS,
    DIES,
    HANGS,
    HANGS_IN_ABORT,
    HANGS_IN_ADD,
    HANGS_IN_STATS,
    HANGS_WHEN_IDLE,
    STEP_FAILS,
)
from tests.waiting import eventually


@pytest.mark.parametrize("first", [STEP_FAILS, DIES])
def test_when_the_process_dies_everybody_hears_of_it(client: EngineClient, first: int) -> None:
    sinks = [submit(client, i, 1_000_000)[1] for i in (1, 2, first)]
    assert all(sink.ended.wait(60) for sink in sinks)
    for sink in sinks:
        assert isinstance(sink.error, EngineDeadError)
        assert sink.error.code == "unavailable"
        assert str(sink.error) == "the engine process has died; the request is lost"


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
    assert sink.ended.wait(60)
    wait_until_ready(client)
    assert client.process_id != pid
    assert client.health.num_restarts == 1
    assert client.health.num_in_flight == 0
    assert_alive(client)
    assert observer.events == ["up", "down", 1, "up", "restarted"]
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
    assert eventually(lambda: "could not be started" in client.health.detail, 10)
    with pytest.raises(
        EngineDeadError,
        match=r"^the engine process could not be started again; a new engine process is",
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


def test_engine_process_whose_rank_fails_ends_requests_with_its_name(
    client: EngineClient,
) -> None:
    pid = client.process_id
    _, sink = submit(client, A_RANK_FAILS)
    assert sink.ended.wait(6)
    assert str(sink.error) == (
        "the engine process has died (rank 1 was killed by SIGKILL); the request is lost"
    )
    wait_until_dead(client, pid)
    wait_until_ready(client)
    assert_alive(client)


def test_a_stopped_process_is_noticed_and_replaced() -> None:
    client = start(heartbeat_timeout_s=2)
    _, sink = submit(client, 1, 1_000_000)
    assert eventually(lambda: sink.responses)
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
    "kind",
    [
        HANGS,
        HANGS_WHEN_IDLE,
        *(
            pytest.param(kind, marks=pytest.mark.large)
            for kind in (HANGS_IN_ADD, HANGS_IN_ABORT, HANGS_IN_STATS)
        ),
    ],
)
def test_an_engine_that_hangs_anywhere_in_its_loop_is_noticed(kind: int) -> None:
    client = start(step_timeout_s=0.5)
    pid = client.process_id
    uid, sink = submit(client, kind, 1_000_000 if kind == HANGS_IN_ABORT else 1)
    if kind == HANGS_IN_ABORT:
        assert eventually(lambda: bool(sink.responses))
        client.abort(uid)
    assert eventually(lambda: client.process_id != pid)
    assert sink.ended.wait(60)
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
        assert sink.ended.wait(60)
        assert isinstance(sink.error, EngineDeadError)
        wait_until_ready(client)
    with pytest.raises(SuspectRequestError, match="the engine process died each of the 2 times"):
        submit(client, DIES)
    assert_alive(client)
    assert client.health.num_restarts == 2


def test_bystanders_are_not_suspected(client: EngineClient) -> None:
    for how in (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL):  # somebody's hand, not theirs
        _, sink = submit(client, 5, 1_000_000)
        kill(client, how)
        assert sink.ended.wait(60)
        wait_until_ready(client)
    submit(client, 5, 1_000_000)
    kill(client, signal.SIGSEGV)
    wait_until_ready(client)
    _, bystander = submit(client, 5, 10)  # with another max_tokens it is another request
    assert bystander.ended.wait(60)


def test_a_request_that_finishes_is_cleared(client: EngineClient) -> None:
    slow = 300  # tokens at about 1 ms each
    for _ in range(3):
        submit(client, 5, slow)
        kill(client, signal.SIGSEGV)
        wait_until_ready(client)
        _, sink = submit(client, 5, slow)
        assert sink.ended.wait(60)
        assert sink.error is None


def test_a_start_that_cannot_be_asked_for_ends() -> None:
    config = EngineConfig(model="fake").model_copy(update={"seed": 2**70})  # no message takes that
    with pytest.raises(EngineDeadError, match="could not be started: a message cannot be encoded"):
        EngineClient(config, Unobserved(), [].append, python=sys.executable, module=FAKE)
