"""Host time per step: its parts, and the command."""

import time

import pytest

from engine.bench import host_steps
from engine.bench.host_steps import CASES, PARTS, PartClock, main


class Busy:
    def inner(self) -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    def outer(self) -> str:
        self.inner()
        self.inner()
        return "done"


def test_a_part_inside_another_counts_for_itself_alone() -> None:
    busy, clock = Busy(), PartClock()
    clock.wrap("inner", busy, "inner")
    clock.wrap("outer", busy, "outer")
    assert busy.outer() == "done"
    assert clock.seconds["inner"] >= 0.04
    assert 0 <= clock.seconds["outer"] < 0.02


def test_the_command_prints_every_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_steps, "_ROUNDS", 1)
    main(["--rows", "1", "3"])
    header, _, *lines = capsys.readouterr().out.splitlines()
    columns = [cell.strip() for cell in header.split("|")[2:-1]]
    assert columns == ["step", *PARTS]
    found = {cells[1].strip(): cells[2:-1] for cells in (line.split("|") for line in lines)}
    assert list(found) == [f"{case}, {rows}" for case in CASES for rows in (1, 3)]
    for case, cells in found.items():
        times = dict(zip(columns, map(float, cells), strict=True))
        assert times.pop("add") > 0 or not case.startswith("arrivals, 3")
        assert min(times.values()) > 0
