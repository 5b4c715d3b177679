"""The run: its parts in order, their time limits, and what a failure refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.bench import gpu_tests, worker
from engine.bench.__main__ import _options, main
from engine.bench.parts import groups
from engine.bench.run import Run
from engine.bench.shapes import SHAPES
from engine.bench.workload import FULL
from kernels.bench import runner, testing
from kernels.bench.operations import OPERATIONS
from kernels.bench.testing import Outcome, Suite

GREEN = Outcome(passed=2)


class Machine:
    """Takes the place of the processes that test and measure.

    Attributes:
        tests: outcomes to return.
        began: what was begun, in order, and its share of the time that was left.
        takes: share of its time that each part takes, by a clock that this class advances.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.tests: dict[str, Outcome] = {"gpu parity": GREEN, "gpu modes": GREEN}
        self.began: list[tuple[str, float]] = []
        self.takes = 1.0
        self.now = 1000.0
        self.out = out
        self.keys: list[str] = []
        monkeypatch.setattr(testing, "run", self._run)
        monkeypatch.setattr(runner, "measure", self._measure)
        monkeypatch.setattr(time, "time", lambda: self.now)

    def main(self, *options: str) -> int:
        self.start = self.now
        return main(["--tiny", "--out", str(self.out), *options])

    @property
    def results(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / "results.json").read_text())
        return content

    def _run(self, suites: list[Suite], deadline: float, **others: Any) -> dict[str, Outcome]:
        self._take("tests", deadline)
        others["changed"](self.tests)
        return self.tests

    def _measure(
        self, keys: list[str], deadline: float, figures: runner.Figures, **others: Any
    ) -> None:
        name = others.get("command", ["kernels"])
        is_engine = "engine.bench.worker" in name
        title = name[name.index("engine.bench.worker") + 1] if is_engine else "kernels"
        if " replays " in title:
            figures.add(keys, {"status": "measured", "replays": 5, "unequal": [], "kinds": {}})
            return
        self._take(title, deadline)
        self.keys += keys
        # A reader sees all that came before.
        assert all(status["status"] for status in self.results["figures"].values())
        figures.add(keys, {"status": "left out", "reason": "this is a test"})

    def _take(self, title: str, deadline: float) -> None:
        left = self.start + 540 - self.now
        self.began.append((title, round((deadline - self.now) / left, 2)))
        self.now += self.takes * (deadline - self.now)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path / "out")


def test_every_part_has_a_share_of_the_time_that_is_left(machine: Machine) -> None:
    assert machine.main() == 0
    assert machine.began == [
        ("tests", 0.38),
        ("tiny engine", 0.5),
        ("kernels", 0.5),
        ("tiny transformers", 0.5),
    ]
    assert machine.now < machine.start + 540
    progress = (machine.out / "progress.txt").read_text()
    assert "tests, for 205 s at most:" in progress
    assert machine.results["replays"]["replays"] > 0


def test_what_is_left_over_goes_to_the_later_parts(machine: Machine) -> None:
    machine.takes = 0.1
    machine.main()
    assert machine.began[1] == ("tiny engine", 0.5)
    assert machine.now < machine.start + 540 * 0.2


def test_a_part_begins_only_while_there_is_time(machine: Machine) -> None:
    assert machine.main("--minutes", "0.05") == 0
    assert machine.began == []
    figures = machine.results["figures"]
    assert figures["tiny decode step, B = 1"]["status"] == "left out"
    assert {each["status"] for each in figures.values()} == {"left out"}
    assert "tests: no time was left" in (machine.out / "progress.txt").read_text()


def test_only_what_was_asked_for_is_done(machine: Machine) -> None:
    machine.main("--only", "kernels", "replays")
    assert [name for name, _ in machine.began] == ["kernels"]
    assert machine.results["warnings"] == ["the tests were left out of this run"]


def red(test: str) -> Outcome:
    return Outcome(passed=2, failed=1, failures=[(test, "1 != 2")], details=[""])


@pytest.mark.parametrize("suite", ["gpu parity", "gpu modes"])
def test_red_tests_refuse_the_figures_of_the_engine_alone(machine: Machine, suite: str) -> None:
    machine.tests[suite] = red("test_x[cuda]")
    assert machine.main() == 1
    assert [name for name, _ in machine.began] == ["tests", "kernels", "tiny transformers"]
    refused = machine.results["figures"]["tiny decode step, B = 1"]
    assert refused["status"] == "refused"
    assert "test_x[cuda] failed" in refused["reason"]
    machine.keys.clear()
    assert machine.main("--anyway") == 1  # for the test
    assert "tiny decode step, B = 1" in machine.keys
    assert "it may compute something else" in machine.results["warnings"][0]


@pytest.mark.parametrize(
    ("tests", "family", "reason"),
    [
        ({}, "llama", None),
        ({"gpu parity": GREEN}, "llama", None),
        ({"gpu parity": red("test_x[cuda-qwen3]")}, "llama", None),
        ({"gpu parity": red("test_x[cuda-llama]")}, "llama", "test_x[cuda-llama] failed"),
        ({"gpu parity": red("test_x[cuda]")}, "llama", "test_x[cuda] failed"),
        ({"gpu parity": Outcome(skipped=3)}, "llama", "none passed"),
        ({"gpu modes": Outcome()}, "llama", "none passed"),
        ({"gpu cancel": red("test_x"), "gpu parity": GREEN}, "llama", None),
    ],
)
def test_a_failure_refuses_the_families_that_it_is_about(
    tests: dict[str, Outcome], family: str, reason: str | None
) -> None:
    found = gpu_tests.refusal(tests, family)
    assert found is None if reason is None else found is not None and found.endswith(reason)


def test_the_families_are_those_of_the_measured_models_and_named_in_tests() -> None:
    text = (gpu_tests.FOLDER / "test_parity.py").read_text()
    for family in {shape.family_name for shape in SHAPES}:
        assert family in gpu_tests.FAMILIES
    assert all(f'"{family}"' in text for family in gpu_tests.FAMILIES)


@pytest.mark.parametrize(("cores", "processes"), [(2, 1), (16, 6)])
def test_every_file_of_tests_is_run_and_the_required_ones_first(
    cores: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    suites = gpu_tests.suites()
    assert [suite.name for suite in suites[:2]] == ["gpu parity", "gpu modes"]
    assert suites[0].shards == processes
    files = {file for suite in suites for file in suite.files}
    assert files == set(gpu_tests.FOLDER.glob("test_*.py"))


def test_the_most_telling_groups_come_first() -> None:
    assert [group.name for group in groups(SHAPES, FULL)] == [
        f"{label} {title}"
        for title in ("engine", "transformers", "transformers, all sequences")
        for label in ("0.5b", "8b", "1.5b")
    ]


def test_the_order_on_a_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "plan", lambda labels, *, tiny: groups(SHAPES, FULL))
    monkeypatch.setattr("engine.bench.run.plan", worker.plan)
    machine.takes = 0.1
    machine.main()
    assert [name for name, _ in machine.began] == [
        "tests",
        "0.5b engine",
        "8b engine",
        "kernels",
        "0.5b transformers",
        "8b transformers",
        "1.5b engine",
        "1.5b transformers",
        *(f"{label} transformers, all sequences" for label in ("0.5b", "8b", "1.5b")),
    ]


def test_without_a_gpu_only_the_tiny_model_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_kernels_of_later_parts_are_compiled_during_the_tests(tmp_path: Path) -> None:
    run = Run(_options(["--tiny", "--out", str(tmp_path)]))
    commands = [" ".join(command) for command, _ in run._kernels_ahead()]
    assert sum(" replays " in command for command in commands) == 4
    assert sum("tiny engine" in command for command in commands) == 1
    assert sum("kernels.bench.worker" in command for command in commands) == len(OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["tiny engine", "fp8 replays 0"])
def test_a_worker_that_only_compiles_measures_nothing(group: str) -> None:
    command = [sys.executable, "-m", "engine.bench.worker", group, "--tiny", "--replays", "20"]
    request = json.dumps({"cases": [], "compile_only": True})
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
