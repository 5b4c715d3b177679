"""The load generator against a server of known delays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from client.bench.load.generators import Generators, Ran
from client.bench.load.plan import draw
from client.bench.load.prompts import PromptSource
from client.bench.load.record import Target
from client.bench.load.scrape import Metrics
from client.bench.load.workload import Lengths, Workload
from client.bench.measure.cpu import OTHERS, STOLEN
from client.bench.measure.measurement import Measurement, measurement
from engine.demo import CHECKPOINT_DIR
from tests.client.bench.fakes import fake_peer

PERCENTS = (50, 90, 99)
FEW = Lengths(2, 6)


class Stub:
    """A server of known delays."""

    def __init__(self, target: Target, log: Path) -> None:
        self.target, self.log = target, log

    def run(self, workload: Workload, *, processes: int = 0) -> Ran:
        plan = draw(workload, PromptSource(CHECKPOINT_DIR), "seed")
        with Generators(self.target, plan, processes=processes) as generators:
            return generators.run()


@pytest.fixture
def stub(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stub]:
    log = tmp_path / "log"
    times = ("--first=0.4", "--gap=0.1", "--spread=0.5")
    server = fake_peer(f"--log={log}", *times, *getattr(request, "param", ()))
    with server.start() as running:
        log.unlink()
        yield Stub(running.target, log)


def _measured(ran: Ran) -> Measurement:
    used = {OTHERS: 0.0, STOLEN: 0.0}
    return measurement(ran, cpu_seconds=used, core_seconds=1.0, memory=0, metrics=Metrics())


def _errors(stub: Stub, ran: Ran) -> dict[str, float]:
    """Return by how much the percentiles are off what the server did, relatively."""
    true = [json.loads(line) for line in stub.log.read_text().splitlines()]
    found = _measured(ran).figures
    pairs = {
        "ttft": (found["ttft"], [t["wrote"][0] - t["got"] for t in true]),
        "latency": (found["latency"], [t["wrote"][-1] - t["got"] for t in true]),
        "gap": (found["gap"], [gap for t in true for gap in np.diff(t["wrote"])]),
    }
    return {
        name: max(abs(np.percentile(seen, p) / np.percentile(actual, p) - 1) for p in PERCENTS)
        for name, (seen, actual) in pairs.items()
    }


def test_percentiles_are_right_within_a_percent(stub: Stub) -> None:
    workload = Workload("", 24, Lengths(8, 8), FEW, gap=0.02)
    errors = {}
    for _ in range(12):  # other programs may take the cores
        stub.log.unlink(missing_ok=True)
        ran = stub.run(workload, processes=2)
        assert [each.error for each in ran.records] == [""] * 24
        errors = _errors(stub, ran)
        if max(errors.values()) < 0.01:
            break
    assert max(errors.values()) < 0.01, errors


@pytest.mark.parametrize(
    "stub", [("--capacity", "1", "--first", "0.2", "--gap", "0")], indirect=True
)
def test_an_open_loop_keeps_its_schedule_and_counts_from_it(stub: Stub) -> None:
    workload = Workload("", 12, Lengths(8, 8), Lengths(1, 1), rate=20, poisson=False)
    ran = stub.run(workload)
    intended = [each.intended - ran.start for each in ran.records]
    assert intended == pytest.approx([n / 20 for n in range(12)], abs=1e-6)
    assert max(each.sent - each.intended for each in ran.records) < 0.1
    # The server takes 0.2 s for each, one at a time: the last waits for all.
    assert ran.records[-1].ttft > 0.2 * 12 * 0.7 - 12 / 20
    assert _measured(ran).goodput(0.35, 1.0) < 3


def test_users_of_a_closed_loop_wait_for_their_answers(stub: Stub) -> None:
    workload = Workload("", 6, Lengths(8, 8), Lengths(1, 1), concurrency=2)
    ran = stub.run(workload)
    assert len(ran.records) == 6
    for at in [each.intended + 1e-4 for each in ran.records]:
        assert sum(r.intended <= at < r.arrivals[-1][0] for r in ran.records) <= 2


def test_turns_repeat_what_was_said(stub: Stub) -> None:
    two = Lengths(2, 2)
    workload = Workload("", 1, Lengths(8, 8), two, turns=3, concurrency=1, history=True)
    ran = stub.run(workload)
    # Later turns are asked as text, whose characters the stub counts.
    lengths = [each.prompt_tokens for each in ran.records]
    assert lengths[0] == 8
    assert lengths[2] > lengths[1] + len(" x x")
    assert [each.turn for each in ran.records] == [0, 1, 2]


def test_a_duration_ends_a_run(stub: Stub) -> None:
    long = Lengths(100, 100)
    workload = Workload("", 2, Lengths(8, 8), long, concurrency=2, duration=1.2)
    ran = stub.run(workload)
    found = _measured(ran)
    assert [each.error for each in ran.records] == ["cut", "cut"]
    assert (found.failed, found.figures["latency"]) == (0, [])
    assert len(found.figures["ttft"]) == 2
    assert found.goodput(60, 60) == 0  # whether they would have met the bounds is not known
    assert 4 <= found.num_tokens <= 40
    assert found.seconds < 2


@pytest.mark.parametrize(
    "stub", [("--capacity", "1", "--first", "0.1", "--gap", "0")], indirect=True
)
def test_a_load_above_the_capacity_is_called_so(stub: Stub) -> None:
    workload = Workload("", 40, Lengths(8, 8), Lengths(1, 1), rate=40)
    assert _measured(stub.run(workload)).falls_behind


def test_one_within_it_is_not(stub: Stub) -> None:
    workload = Workload("", 24, Lengths(8, 8), Lengths(1, 1), rate=40)
    found = _measured(stub.run(workload))
    assert not found.falls_behind
    assert found.limit == "" or "late" in found.limit or "busy" in found.limit
