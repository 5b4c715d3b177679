import pytest

from engine.service.stages.transit import TransitMeter


def test_the_meter_tells_the_least_time_of_each_window() -> None:
    meter = TransitMeter()
    assert meter.add(9.9, 10.0) is None
    assert meter.add(9.98, 10.05) is None
    assert meter.add(10.0, 10.09) is None
    assert meter.add(10.19, 10.2) == pytest.approx(0.07)
    assert meter.add(50.0, 50.3) == pytest.approx(0.01)
    assert meter.add(60.0, 50.31) is None  # clocks of a forged message
    assert meter.add(50.39, 50.5) == 0.0
