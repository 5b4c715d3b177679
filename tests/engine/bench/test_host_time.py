"""Host time per step: its parts, and the command."""

import json
import time
from pathlib import Path

import pytest

from engine.bench.host_steps import CASES, PARTS, PartClock
from engine.bench.host_time import main


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
    clock.wrap("inner", busy, "inner", "of another version")
    clock.wrap("outer", busy, "outer")
    assert busy.outer() == "done"
    assert clock.seconds["inner"] >= 0.04
    assert 0 <= clock.seconds["outer"] < 0.02


def test_a_part_that_no_method_does_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has none of first, second"):
        PartClock().wrap("part", Busy(), "first", "second")


def test_the_command_prints_every_case_and_writes_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, plot = tmp_path / "host.json", tmp_path / "host.png"
    main(
        [
            *("--rows", "1", "3", "--rounds", "1", "--against", str(Path(__file__).parents[3])),
            *("--json", str(figures), "--plot", str(plot)),
        ]
    )
    found = json.loads(figures.read_text())
    assert found.keys() == {"against", "here"}
    for times in found.values():
        assert set(times) == set(CASES)
        for rows in times.values():
            assert set(rows) == {"1", "3"}
            for parts in rows.values():
                assert set(parts) == set(PARTS)
                assert all(parts[part] > 0 for part in PARTS if part != "add")
        assert times["arrivals"]["3"]["add"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("arrivals") for line in lines) == 3 * 2


def test_another_checkout_must_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--against", str(tmp_path)])
    assert "is no checkout" in capsys.readouterr().err
