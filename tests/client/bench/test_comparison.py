"""Servers in turns, over rounds: failures and interrupts keep what was measured."""

import io
import os
import signal
import time
from typing import Any

import psutil
import pytest
from rich.console import Console

from client.bench import comparison as comparing
from client.bench.comparison import Comparison
from client.bench.load.workload import STANDARD, Workload, tiny
from client.bench.measure.measurement import Measurement
from client.bench.report.results import Bounds, as_json
from client.bench.servers.server import Running
from engine.demo import CHECKPOINT_DIR
from tests.client.bench.fakes import fake_measurement, fake_peer

TINY = [tiny(each) for each in STANDARD]


def test_servers_take_turns_and_one_that_fails_is_left_out(
    quiet: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=200)
    # The third server answers the first request, of one token, and no longer ones.
    servers = [fake_peer(name="a"), fake_peer(name="b"), fake_peer("--tokens=1", name="c")]
    workloads = [TINY[0], TINY[4]]
    results = Comparison(servers[:1], servers[1:], CHECKPOINT_DIR, workloads, 2, console).run()
    assert results.tridents == ["a"]
    for name in "ab":
        for session in results.sessions[name]:
            assert session is not None
            assert set(session.measurements) == {"W1", "W5"}
    first, second = results.sessions["c"]
    assert first is not None
    assert not first.measurements
    assert second is None
    assert "answered with 1 tokens where 4" in results.failures["c"]
    output = console.file.getvalue()  # type: ignore[attr-defined]
    places = [output.index(f"round {n}, {name}, W1") for n, name in [(1, "a"), (1, "b")]]
    later = [output.index(f"round 2, {name}, W1") for name in "ba"]
    assert [*places, *later] == sorted([*places, *later])


def test_an_interrupt_leaves_what_was_measured(
    quiet: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=200)
    servers = [fake_peer(name="a"), fake_peer(name="b")]
    workloads = [TINY[0], TINY[4]]
    comparison = Comparison(servers[:1], servers[1:], CHECKPOINT_DIR, workloads, 2, console)
    asked: list[str] = []
    pids: set[int] = set()

    def measure(running: Running, workload: Workload, *_: Any, **__: Any) -> Measurement:
        asked.append(workload.name)
        pids.update(running.pids)
        if len(asked) == 6:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        return fake_measurement(1.0)

    monkeypatch.setattr(comparing, "run_workload", measure)
    results = comparison.run()
    assert asked == ["W1", "W5"] * 3
    assert len(pids) == 3
    assert results.interrupted
    (one,) = results.sessions["a"]
    complete, partial = results.sessions["b"]
    assert one is not None
    assert complete is not None
    assert partial is not None
    assert list(partial.measurements) == ["W1"]
    assert [row["server"] for row in as_json(results, Bounds())["summary"]] == ["a", "b"] * 2
    assert "interrupted: this is what was measured" in console.file.getvalue()  # type: ignore[attr-defined]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_interrupt_before_anything_was_measured_is_one(
    quiet: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "first_token", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Comparison(
            [fake_peer()], [], CHECKPOINT_DIR, TINY[:1], 1, Console(file=io.StringIO())
        ).run()
