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
from client.bench.load.workload import BY_NAME, Workload, tiny
from client.bench.measure.measurement import Measurement
from client.bench.report.results import Bounds, as_json
from client.bench.servers.server import Running
from engine.demo import CHECKPOINT_DIR
from tests.client.bench.fakes import fake_measurement, fake_peer

W = ("W1", "W5")
TINY = [tiny(BY_NAME[each]) for each in W]


def test_servers_take_turns_and_one_that_fails_is_left_out(
    quiet: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=200)
    # The third server answers the first request, of one token, and no longer ones.
    servers = [fake_peer(name="a"), fake_peer(name="b"), fake_peer("--tokens=1", name="c")]
    results = Comparison(servers[:1], servers[1:], CHECKPOINT_DIR, TINY, 2, console).run()
    assert results.tridents == ["a"]
    order = [(run.round, run.server, run.workload) for run in results.runs]
    assert order == [(n, s, w) for n, s in [(0, "a"), (0, "b"), (1, "b"), (1, "a")] for w in W]
    assert "answered with 1 tokens where 4" in results.failures["c"]


def test_an_interrupt_leaves_what_was_measured(
    quiet: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=200)
    servers = [fake_peer(name="a"), fake_peer(name="b")]
    comparison = Comparison(servers[:1], servers[1:], CHECKPOINT_DIR, TINY, 2, console)
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
    assert [(run.server, run.workload) for run in results.runs[3:]] == [("b", "W5"), ("b", "W1")]
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
        Comparison([fake_peer()], [], CHECKPOINT_DIR, TINY, 1, Console(file=io.StringIO())).run()
