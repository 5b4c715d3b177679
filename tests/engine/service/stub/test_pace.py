import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.service.stages.transit import TransitMeter
from engine.service.stub.pace import Pace

IN_TIME, LATE = 0.001, 0.5


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Pace:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2))
    return Pace()


def test_the_interval_grows_with_the_streams_up_to_a_bound(pace: Pace) -> None:
    assert pace.interval_s(1) == 0.004
    assert pace.interval_s(64) == 0.064
    assert pace.interval_s(256) == 0.256
    assert pace.interval_s(100_000) == 1.0


def test_cores_that_compute_no_model_carry_more(
    pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace.set_limit(runs_on_host=False)
    assert pace.responses_per_s == 2400
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    pace.set_limit(runs_on_host=False)
    assert pace.responses_per_s == 4000


def test_messages_that_wait_slow_it_down_until_they_do_not(pace: Pace) -> None:
    rates = []
    for _ in range(10):
        pace.on_transit(LATE)
        rates.append(pace.responses_per_s)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 250  # after a second
    for _ in range(30):
        pace.on_transit(IN_TIME)
    assert pace.responses_per_s == 1000


@given(st.lists(st.floats(0, 1e12)))
def test_its_rate_stays_within_its_limits(transits: list[float]) -> None:
    pace = Pace()
    limit = pace.responses_per_s
    for transit in transits:
        pace.on_transit(transit)
        assert 100 <= pace.responses_per_s <= limit


def test_the_meter_tells_the_least_time_of_each_window() -> None:
    meter = TransitMeter()
    assert meter.add(9.9, 10.0) is None
    assert meter.add(9.98, 10.05) is None
    assert meter.add(10.0, 10.09) is None
    assert meter.add(10.19, 10.2) == pytest.approx(0.07)
    assert meter.add(50.0, 50.3) == pytest.approx(0.01)
    assert meter.add(60.0, 50.31) is None  # clocks of a forged message
    assert meter.add(50.39, 50.5) == 0.0
