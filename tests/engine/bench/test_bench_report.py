"""The report holds figures against floors and aims, and names what is missing."""

import json
from pathlib import Path

import pytest

from engine.bench import __main__ as command
from engine.bench import gpu_tests, requirements, worker
from engine.bench.parts import groups
from engine.bench.report import Report
from engine.bench.shapes import SHAPES, TINY
from engine.bench.workload import FULL, SMALL
from kernels.bench import runner, testing
from kernels.bench.operations import Operation
from kernels.bench.testing import Outcome

CEILINGS: dict[str, float | None] = {
    "copy_gb_s": 4300.0,
    "bf16_tflop_s": 790.0,
    "fp8_tflop_s": None,
}
GREEN, RED = Outcome(passed=2), Outcome(passed=2, failed=1, failures=[("test_x", "1 != 2")])
DECODE = {"status": "measured", "context": 1024.0, "host_seconds": 0.00035, "steps": 48}


def report(figures: dict[str, dict[str, object]], *, judged: bool = True) -> Report:
    found = Report({"gpu": "none"}, groups(SHAPES, FULL), judged=judged)
    found.tests = {"parity": GREEN, "cancel": RED}
    found.ceilings = {shape.label: CEILINGS for shape in SHAPES}
    found.figures = figures
    return found


def line(lines: list[str], text: str) -> list[str]:
    """Return the cells of the first line with this text."""
    return next(each for each in lines if text in each).split(text)[1].split()


def test_figures_are_held_against_floors_and_aims() -> None:
    lines = report(
        {
            "8b decode step, B = 1": {**DECODE, "seconds": 0.004, "tokens_per_second": 250.0},
            "8b decode step, B = 256": {**DECODE, "seconds": 0.020, "tokens_per_second": 12800.0},
            "0.5b decode step, B = 1": {**DECODE, "seconds": 0.00059, "tokens_per_second": 1695.0},
        }
    ).lines()
    first = lines.index(next(each for each in lines if each.startswith("Llama-3.1-8B, engine")))
    large = lines[first:]
    assert line(large, "B = 1 ") == ["4.00", "250", "3.52", "88%", ">=", "85%", "met"]
    assert line(large, "B = 256 ")[2:] == ["12.85", "64%", ">=", "75%", "MISSED"]
    assert line(lines, "Qwen2.5-0.5B, engine") == []
    assert line(lines, "B = 1 ")[-4:] == ["<=", "0.6", "ms", "met"]
    # Of the host's work only that of the largest step is held against an aim.
    host = [each.split() for each in lines if "the host's work" in each]
    assert [cells[5:] for cells in host] == [["0.35"], ["0.35"], ["0.35", "<=", "0.4", "ms", "met"]]
    assert lines[-1] == "aims: 3 met, 1 missed"


def test_transformers_stands_beside_the_engine_on_the_same_requests() -> None:
    def done(rate: float) -> dict[str, object]:
        return {"status": "measured", "seconds": 10.0, "tokens_per_second": rate}

    figures = {
        "8b offline, 64 sequences": done(4000.0),
        "8b offline, 256 sequences": done(8000.0),
        "8b transformers continuous batching, 64 sequences": done(1000.0),
        "8b transformers generate, 64 sequences": done(500.0),
        "8b transformers continuous batching, 256 sequences": done(1000.0),
        "0.5b transformers generate, 64 sequences": done(500.0),
    }
    lines = report(figures).lines()
    factors = [each.split() for each in lines if "the engine is" in each]
    assert [cells[3] for cells in factors] == ["4.00x", "8.00x", "8.00x"]
    assert [cells[6:] for cells in factors] == [[">=", "5x", "MISSED"], [], [">=", "5x", "met"]]


def test_what_is_missing_is_named_and_written(tmp_path: Path) -> None:
    found = report(
        {
            "8b decode step, B = 1": {"status": "failed", "reason": "OutOfMemoryError: x"},
            "1.5b prefill, 1 x 8192 tokens": {"status": "left out", "reason": "no time was left"},
        }
    )
    lines = found.lines()
    assert "8b decode step, B = 1: failed: OutOfMemoryError: x" in lines
    assert "1.5b prefill, 1 x 8192 tokens: left out: no time was left" in lines
    assert "FAILED cancel: test_x: 1 != 2" in lines
    assert found.faulty
    found.write_json(tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["figures"] == found.figures
    assert content["tests"]["cancel"]["failed"] == 1


def test_a_tiny_model_is_not_judged() -> None:
    figures = {"8b decode step, B = 256": {**DECODE, "seconds": 0.02, "tokens_per_second": 1.0}}
    lines = report(figures, judged=False).lines()
    assert not any("MISSED" in each or "met" in each.split() for each in lines)
    assert lines[-1] == "The model is tiny: all this shows is that everything ran."


def test_the_most_telling_groups_come_first() -> None:
    assert [group.name for group in groups(SHAPES, FULL)] == [
        f"{label} {title}"
        for title in ("engine", "transformers", "transformers, all sequences")
        for label in ("0.5b", "8b", "1.5b")
    ]


def test_a_missing_package_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requirements, "PACKAGES", ("torch", "no_such_package"))
    assert command.main([]) == 2
    assert capsys.readouterr().out.startswith("missing Python packages: no_such_package. ")


def test_without_a_gpu_only_the_tiny_model_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("red", ["parity", "modes"])
def test_red_tests_refuse_the_engines_figures_alone(
    red: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tests = {"parity": GREEN, "modes": GREEN, "cancel": GREEN, red: RED}
    measured: list[str] = []

    def measure(keys: list[str], *_: object, **__: object) -> runner.Figures:
        measured.extend(keys)
        return runner.Figures(CEILINGS, {})

    monkeypatch.setattr(gpu_tests, "run", lambda *_: tests)
    monkeypatch.setattr(runner, "measure", measure)
    file = tmp_path / "r.json"
    assert command.main(["--tiny", "--json", str(file)]) == 1
    assert measured
    assert all("transformers" in key for key in measured)
    refused = json.loads(file.read_text())["figures"]["tiny decode step, B = 1"]
    assert refused == {"status": "refused", "reason": f"tests of {red} are not green"}
    assert command.main(["--tiny", "--anyway"]) == 1
    assert "tiny decode step, B = 1" in measured
    warning = f"WARNING: tests of {red} are not green: the engine may compute something else"
    assert warning in capsys.readouterr().out


def test_what_there_is_no_time_for_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_tests, "run", lambda *_: {"parity": GREEN, "modes": GREEN})
    file = tmp_path / "r.json"
    assert command.main(["--tiny", "--minutes", "0.5", "--json", str(file)]) == 0
    states = {each["status"] for each in json.loads(file.read_text())["figures"].values()}
    assert states == {"left out"}


@pytest.mark.parametrize(("cores", "processes"), [(2, 3), (16, 12)])
def test_the_files_of_tests_are_shared_out_where_there_are_cores(
    cores: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Operation] = []
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr(testing, "run", lambda files, *_, **__: given.extend(files))
    gpu_tests.run(0.0, print)
    assert sum(each.shards for each in given) == processes
    files = {file.stem.removeprefix("test_") for file in gpu_tests.FOLDER.glob("test_*.py")}
    assert {each.name for each in given} == files > set(gpu_tests.REQUIRED)


@pytest.mark.slow
def test_a_run_from_the_command_to_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the tests and transformers, which run elsewhere."""
    monkeypatch.setattr(worker, "plan", lambda *_, **__: worker.groups([TINY], SMALL)[:1])
    monkeypatch.setattr(gpu_tests, "run", lambda *_: {"parity": GREEN, "modes": GREEN})
    file = tmp_path / "r.json"
    assert command.main(["--tiny", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert {figures["status"] for figures in content["figures"].values()} == {"measured"}
    assert len(content["figures"]) == 7
    assert "two small layers, engine" in capsys.readouterr().out
