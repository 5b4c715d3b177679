"""The number of threads follows from what a step takes with them; the step is simulated."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.execution import cpu_choices
from engine.execution.cpu_choices import choose_num_threads, most_threads


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give the process eight threads and no quota."""
    for name in ("_CPU_MAX", "_CFS_QUOTA", "_CFS_PERIOD"):
        monkeypatch.setattr(cpu_choices, name, tmp_path / name)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


class Clock:
    """Time passes in steps alone, and by the number of threads."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.tried: list[int] = []

    def run_step(self) -> None:
        self.now += self.seconds[torch.get_num_threads()]
        if torch.get_num_threads() not in self.tried:
            self.tried.append(torch.get_num_threads())

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(request.param)
    monkeypatch.setattr(cpu_choices.time, "perf_counter", clock.perf_counter)
    return clock


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ({1: 0.016, 2: 0.008, 4: 0.004, 8: 0.002}, 8),
        ({1: 0.016, 2: 0.008, 4: 0.006, 8: 0.0059}, 4),  # not worth four more cores
        ({1: 0.002, 2: 0.003, 4: 0.004, 8: 0.006}, 1),
        ({1: 0.016, 2: 0.018, 4: 0.008, 8: 0.01}, 4),
    ],
    indirect=["clock"],
)
def test_more_threads_must_pay(clock: Clock, expected: int) -> None:
    assert choose_num_threads(most_threads(), clock.run_step) == expected
    assert clock.tried == [8, 1, 2, 4]


@pytest.mark.parametrize("clock", [{1: 0.2, 8: 0.3}], indirect=True)
def test_a_long_step_has_work_for_all(clock: Clock) -> None:
    assert choose_num_threads(most_threads(), clock.run_step) == 8
    assert clock.now == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("text", "tried"), [("250000 100000", [3, 1, 2]), ("50000 100000", [1]), ("max 100000", None)]
)
@pytest.mark.parametrize("clock", [{i: 0.05 / i for i in range(1, 9)}], indirect=True)
def test_the_quota_of_a_container_is_kept(clock: Clock, text: str, tried: list[int] | None) -> None:
    cpu_choices._CPU_MAX.write_text(text)
    choose_num_threads(most_threads(), clock.run_step)
    assert clock.tried == (tried or [8, 1, 2, 4])


@pytest.mark.parametrize("clock", [{i: 0.05 / i for i in range(1, 9)}], indirect=True)
@pytest.mark.parametrize(("quota", "tried"), [("400000", [4, 1, 2]), ("-1", [8, 1, 2, 4])])
def test_the_older_form_of_the_quota(clock: Clock, quota: str, tried: list[int]) -> None:
    cpu_choices._CFS_QUOTA.write_text(quota)
    cpu_choices._CFS_PERIOD.write_text("100000")
    choose_num_threads(most_threads(), clock.run_step)
    assert clock.tried == tried
