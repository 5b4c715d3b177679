"""The run: its stages in order, their time limits, and what a failure refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.bench.__main__ import _options, main
from engine.bench.gpu import engine, run
from engine.bench.gpu.packages import ROOT
from engine.bench.gpu.plan import groups
from engine.bench.gpu.run import Run, files_of_tests
from kernels.bench.cases import tiny_cases
from kernels.bench.shapes import SHAPES


class Machine:
    """Takes the place of the processes that test and measure.

    Attributes:
        failing: tests that fail.
        began: what was begun, in order, and its share of the time that was left.
        takes: share of its time that each stage takes, by a clock that this class advances.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.failing: list[str] = []
        self.began: list[tuple[str, float]] = []
        self.takes, self.now, self.out = 1.0, 1000.0, out
        machine = self

        class Supervisor:
            def __init__(
                self, command: list[str], keys: Any, deadline: float, ended: Any, **_: Any
            ) -> None:
                self.name = "tests" if keys is None else command[3]
                self.keys, self.deadline, self.ended = keys, deadline, ended

            def run(self) -> None:
                if "replays" not in self.name:
                    left = machine.start + 540 - machine.now
                    share = round((self.deadline - machine.now) / left, 2)
                    machine.began.append((self.name, share))
                    machine.now += machine.takes * (self.deadline - machine.now)
                if self.keys is None:
                    self.ended("tests/gpu/test_parity.py::test_y", {"status": "passed"})
                    for test in machine.failing:
                        self.ended(test, {"status": "failed", "reason": "1 != 2"})
                for key in self.keys or ():
                    self.ended(key, {"status": "left out", "reason": ""})

        monkeypatch.setattr(run, "Supervisor", Supervisor)
        monkeypatch.setattr(time, "time", lambda: self.now)

    def main(self, *options: str) -> int:
        self.start = self.now
        return main(["--tiny", "--out", str(self.out), *options])

    @property
    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads((self.out / "results.json").read_text())["figures"]
        return figures


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path / "out")


def test_every_stage_has_a_share_of_the_time_that_is_left(machine: Machine) -> None:
    assert machine.main() == 0
    stages = ["ceilings", "tiny engine", "kernels", "tiny transformers"]
    assert machine.began == [("tests", 0.38), *((name, 0.5) for name in stages)]
    assert machine.now < machine.start + 540
    assert "tests, for 205 s at most" in (machine.out / "progress.txt").read_text()
    assert len(machine.figures) == sum(len(group.parts) for group in groups(tiny=True))


def test_a_stage_begins_only_while_there_is_time(machine: Machine) -> None:
    assert machine.main("--minutes", "0.05") == 0
    assert machine.began == []
    assert machine.figures["ceilings"]["reason"] == "no time was left"


def test_only_what_was_asked_for_is_done(machine: Machine) -> None:
    machine.main("--only", "kernels", "replays")
    assert [name for name, _ in machine.began] == ["ceilings", "kernels"]
    assert "Tests: none." in (machine.out / "report.md").read_text()


def test_red_tests_refuse_the_figures_of_the_engine_alone(machine: Machine) -> None:
    machine.failing = ["tests/gpu/test_modes.py::test_x[cuda]"]
    assert machine.main() == 1
    refused = machine.figures["tiny decode step, B = 1"]
    assert refused["status"] == "refused"
    assert "test_x[cuda] failed" in refused["reason"]
    assert {each["status"] for each in machine.figures.values()} == {"refused", "left out"}


def test_the_order_on_a_gpu_has_the_most_telling_groups_first() -> None:
    names = [group.name for group in groups(tiny=False) if group.kind != "replays"]
    assert names == [
        *("ceilings", "0.5b engine", "8b engine", "kernels", "0.5b transformers"),
        *("8b transformers", "1.5b engine", "1.5b transformers"),
    ]
    keys = [key for group in groups(tiny=False) for key in group.keys]
    assert len(set(keys)) == len(keys)


def test_the_families_are_those_of_the_measured_models_and_named_in_tests() -> None:
    text = (ROOT / "tests/gpu/test_parity.py").read_text()
    assert {shape.family["model_type"] for shape in SHAPES} <= {*engine.FAMILIES}
    assert all(f'"{family}"' in text for family in engine.FAMILIES)


def test_every_file_of_tests_is_run_and_the_required_ones_first() -> None:
    files = [str(path.relative_to(ROOT / "tests")) for path in files_of_tests(tiny=False)]
    assert files[:2] == ["gpu/test_parity.py", "gpu/test_modes.py"]
    assert {name for name in files if name.startswith("gpu")} == {
        f"gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")
    }
    assert "kernels/sampling/test_draw.py" in files
    assert len(files) == len(set(files)) > 40


def test_without_a_gpu_only_the_tiny_model_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_kernels_of_later_stages_are_compiled_during_the_tests(tmp_path: Path) -> None:
    commands = Run(_options(["--tiny", "--out", str(tmp_path)]))._ahead()
    names = [command[3] for command, _ in commands]
    assert sum("replays" in name for name in names) == 1
    assert names.count("tiny engine") == 1
    kernels = [key for command, keys in commands if command[3] == "kernels" for key in keys]
    assert len(set(kernels)) == len(kernels) == len(tiny_cases())


@pytest.mark.slow
@pytest.mark.parametrize("group", ["tiny engine", "gqa replays 0", "kernels"])
def test_a_worker_that_only_compiles_measures_nothing(group: str) -> None:
    command = [sys.executable, "-m", "engine.bench.gpu.worker", group, "--tiny", "--compile"]
    request = json.dumps({"keys": []})
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
