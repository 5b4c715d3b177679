"""How often streams get a response: by what responses cost, and within bounds."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.service.stub.delivery import RateController, StageTimes


class Machine:
    """A clock and the CPU times of a server with two stubs."""

    def __init__(self) -> None:
        self.now = 100.0
        self.server = 7.0
        self.stubs = {11: 3.0, 12: 5.0}
        self.idle = 900.0
        self.rate = RateController(self.times, num_cores=2, clock=lambda: self.now)

    def times(self) -> StageTimes:
        return StageTimes(self.server, dict(self.stubs), self.idle)

    def run(
        self,
        seconds: int,
        rate: int = 1000,
        *,
        server: float = 0.2e-3,
        stubs: tuple[float, float] = (0.05e-3, 0.15e-3),
        idle: float = 0.0,
    ) -> None:
        """Send `rate` responses per second at these costs; `idle` is the share of both cores."""
        for _ in range(seconds * rate):
            self.now += 1 / rate
            self.idle += 2 * idle / rate
            self.server += server
            for pid, cost in zip(self.stubs, stubs, strict=True):
                self.stubs[pid] += cost
            self.rate.count_response()


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_before_a_measurement_a_guess_holds(machine: Machine) -> None:
    assert machine.rate.interval_s(1) == 0.004
    # 1.8 cores carry 3,600 per second.
    assert machine.rate.interval_s(100) == pytest.approx(100 / 3600)


def test_what_responses_cost_sets_the_interval(machine: Machine) -> None:
    machine.run(12)  # 0.4 ms each: half a core carries 1,250 per second
    assert machine.rate.interval_s(64) == pytest.approx(64 / 1250, rel=0.01)
    machine.run(12, server=0.1e-3, stubs=(0.05e-3, 0.05e-3))
    assert machine.rate.interval_s(64) == pytest.approx(64 / 2500, rel=0.01)


def test_responses_take_what_is_idle_and_give_it_back(machine: Machine) -> None:
    machine.run(12)
    machine.run(2, idle=0.2)  # four measurements, each of a tenth of both cores to spare
    assert machine.rate.interval_s(256) == pytest.approx(256 * 0.4e-3 / (0.65 * 2), rel=0.02)
    machine.run(5, idle=0.1)  # neither idle nor busy
    assert machine.rate.interval_s(256) == pytest.approx(256 * 0.4e-3 / (0.65 * 2), rel=0.02)
    machine.run(12, idle=0.5)
    assert machine.rate.interval_s(256) == pytest.approx(256 * 0.4e-3 / (0.9 * 2), rel=0.01)
    machine.run(12)
    assert machine.rate.interval_s(256) == pytest.approx(256 * 0.4e-3 / 0.5, rel=0.01)


def test_beside_an_engine_on_the_same_cores_responses_take_a_sixteenth(machine: Machine) -> None:
    machine.rate.beside_cpu_engine = True
    machine.run(12, idle=0.3)
    assert machine.rate.interval_s(16) == pytest.approx(16 * 0.4e-3 / (2 / 16), rel=0.01)


def test_a_token_waits_no_longer_than_the_bound(machine: Machine) -> None:
    machine.run(12)
    assert machine.rate.interval_s(2000) == 1.0


def test_few_responses_tell_nothing(machine: Machine) -> None:
    machine.run(30, 50, server=10e-3, stubs=(1e-3, 1e-3))
    assert machine.rate.interval_s(100) == pytest.approx(100 / 3600)


def test_what_new_requests_cost_the_stages_is_no_cost_of_responses(machine: Machine) -> None:
    machine.run(12)
    before = machine.rate.interval_s(64)
    machine.run(3, server=2e-3, stubs=(2e-3, 0.15e-3))
    assert machine.rate.interval_s(64) == pytest.approx(before, rel=0.01)
    machine.run(2, server=2e-3, stubs=(2e-3, 0.15e-3))  # it has lasted: it is their cost
    assert machine.rate.interval_s(64) == pytest.approx(10.4 * before, rel=0.02)


def test_a_stub_that_is_started_again_is_no_measurement(machine: Machine) -> None:
    machine.run(12)
    before = machine.rate.interval_s(64)
    machine.stubs = {11: 900.0, 13: 0.0}
    machine.run(1)
    assert machine.rate.interval_s(64) == pytest.approx(before)


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 4), max_size=5), st.integers(0, 10**5))
def test_the_interval_is_within_its_bounds_and_grows_with_the_streams(
    measured: list[tuple[float, float, float, float]], num_streams: int
) -> None:
    machine = Machine()
    for server, first, second, idle in measured:
        machine.run(1, 101, server=server, stubs=(first, second), idle=idle)
    interval_s = machine.rate.interval_s(num_streams)
    assert 0.004 <= interval_s <= 1.0
    assert machine.rate.interval_s(num_streams + 1) >= interval_s


def test_the_processes_are_the_server_and_its_children() -> None:
    """Of the processes that a server starts, each is a stub."""
    code = (
        "import os, time; from engine.service.stub.delivery import ServerProcesses\n"
        "until = time.process_time() + 0.1\n"
        "while time.process_time() < until: pass\n"
        "times = ServerProcesses().times()\n"
        "assert times.server > 0 and times.stubs[os.getpid()] > 0.09 and times.idle > 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
