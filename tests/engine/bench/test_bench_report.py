"""The report holds figures against floors and aims, and names what is missing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.bench.parts import groups
from engine.bench.report import Report
from engine.bench.shapes import SHAPES
from engine.bench.workload import FULL
from kernels.bench.case import Aim
from kernels.bench.testing import Outcome
from tests.kernels.bench_support import fake_case, figures_of

CEILINGS: dict[str, float | None] = {
    "copy_gb_s": 4300.0,
    "bf16_tflop_s": 790.0,
    "fp8_tflop_s": None,
}
GREEN = Outcome(passed=2)
RED = Outcome(passed=2, failed=1, failures=[("test_x", "1 != 2")], details=["a traceback"])
DECODE = {"status": "measured", "context": 1024.0, "host_seconds": 0.00035, "steps": 48}
REPLAYS = {
    "status": "measured",
    "replays": 250,
    "unequal": [],
    "kinds": {"decode": 150, "mixed": 100},
    "seconds": 1.0,
}
MACHINE = {"date": "2026-01-01", "gpu": "NVIDIA H200", "settings": None}


def report(
    folder: Path, figures: dict[str, dict[str, Any]], *, judged: bool = True, tests: Outcome = GREEN
) -> Report:
    cases = [fake_case("near", Aim(share=0.85)), fake_case("far")]
    found = Report(MACHINE, groups(SHAPES, FULL), cases, folder, judged=judged)
    found.tests = {"gpu parity": GREEN, "gpu cancel": tests}
    found.measured.ceilings = CEILINGS
    found.measured.cases |= figures
    return found


def cells(lines: list[str], text: str) -> list[str]:
    """Return the cells of the first row with this text, after its name."""
    row = next(each for each in lines if text in each)
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_figures_are_held_against_floors_and_aims(tmp_path: Path) -> None:
    lines = report(
        tmp_path,
        {
            "8b decode step, B = 1": {**DECODE, "seconds": 0.004, "tokens_per_second": 250.0},
            "8b decode step, B = 256": {**DECODE, "seconds": 0.020, "tokens_per_second": 12800.0},
            "0.5b decode step, B = 1": {**DECODE, "seconds": 0.00059, "tokens_per_second": 1695.0},
            "rms_norm near": figures_of(10.0, bytes=40_000_000),
        },
    ).lines()
    large = "Llama-3.1-8B, decode step, B = "
    assert cells(lines, f"{large}1 ") == ["4.00", "250", "3.52", "88%", ">= 85%", "met"]
    assert cells(lines, f"{large}256 ")[2:] == ["12.85", "64%", ">= 75%", "MISSED"]
    assert cells(lines, "Qwen2.5-0.5B, decode step, B = 1 ")[-2:] == ["<= 0.6 ms", "met"]
    # Of the host's work only that of the largest step is held against an aim.
    assert cells(lines, f"{large}1: of it the host's work") == ["0.35", *[""] * 5]
    assert cells(lines, f"{large}256: of it the host's work")[-2:] == ["<= 0.4 ms", "met"]
    assert cells(lines, "rms_norm near")[:3] == ["10.0", "4000 GB/s", "93%"]
    assert lines[-1] == "Aims: 4 met, 1 missed."


def test_transformers_stands_beside_the_engine_on_the_same_requests(tmp_path: Path) -> None:
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
    lines = report(tmp_path, figures).lines()
    factors = [each.split("|")[1:-1] for each in lines if "the engine is" in each]
    assert [row[0].split()[4] for row in factors] == ["4.00x", "8.00x", "8.00x"]
    verdicts = [[cell.strip() for cell in row[-2:]] for row in factors]
    assert verdicts == [[">= 5x", "MISSED"], ["", ""], [">= 5x", "met"]]


def test_what_was_measured_how_stands_above_the_tables(tmp_path: Path) -> None:
    found = report(tmp_path, {"gqa replays, episodes 0 to 9": REPLAYS}, tests=RED)
    found.warnings.append("the engine may compute something else")
    lines = found.lines()
    assert "date 2026-01-01, gpu NVIDIA H200." in lines
    tests = "Tests: 4 passed, 1 failed, 0 skipped."
    assert f"Ceilings: copy_gb_s 4300, bf16_tflop_s 790. {tests}" in lines
    assert "Steps replayed: 250 (150 decode, 100 mixed), with other bits: 0." in lines
    assert "WARNING: the engine may compute something else" in lines
    assert "FAILED gpu cancel: test_x: 1 != 2" in lines


def test_what_is_missing_is_named_and_written(tmp_path: Path) -> None:
    found = report(
        tmp_path,
        {
            "8b decode step, B = 1": {"status": "failed", "reason": "OutOfMemoryError: x"},
            "rms_norm far": {"status": "left out", "reason": "no time was left"},
        },
        tests=RED,
    )
    lines = found.lines()
    assert "8b decode step, B = 1: failed: OutOfMemoryError: x" in lines
    assert "rms_norm far: left out: no time was left" in lines
    found.write()
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["figures"] == found.figures
    assert content["tests"]["gpu cancel"]["failed"] == 1
    assert (tmp_path / "report.md").read_text().splitlines() == lines
    assert "gpu cancel: test_x\na traceback" in (tmp_path / "failures.txt").read_text()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("figures", "tests", "faulty"),
    [
        ({}, GREEN, False),
        ({}, RED, True),
        ({"rms_norm far": {"status": "left out", "reason": ""}}, GREEN, False),
        ({"rms_norm far": {"status": "refused", "reason": ""}}, GREEN, True),
        ({"rms_norm far": {"status": "failed", "reason": ""}}, GREEN, True),
        ({"rms_norm far": figures_of(1.0, peers={"torch": {"differs": "shapes"}})}, GREEN, True),
        ({"gqa replays, episodes 0 to 9": REPLAYS}, GREEN, False),
        ({"gqa replays, episodes 0 to 9": {**REPLAYS, "unequal": ["gqa:1:2: x"]}}, GREEN, True),
    ],
)
def test_faults(
    figures: dict[str, dict[str, Any]], tests: Outcome, faulty: bool, tmp_path: Path
) -> None:
    found = report(tmp_path, figures, tests=tests)
    assert bool(found.faulty) is faulty
    assert any("UNEQUAL" in line for line in found.lines()) is ("gqa:1:2" in str(figures))


def test_a_tiny_model_is_not_judged(tmp_path: Path) -> None:
    figures = {"8b decode step, B = 256": {**DECODE, "seconds": 0.02, "tokens_per_second": 1.0}}
    lines = report(tmp_path, figures, judged=False).lines()
    assert cells(lines, "B = 256 ")[-2:] == ["", ""]
    assert lines[-1] == "The models are tiny: all this shows is that everything ran."


def test_figures_of_several_threads_are_written_one_after_the_other(tmp_path: Path) -> None:
    found = report(tmp_path, {})
    found.measured.changed = found.write
    with ThreadPoolExecutor(8) as pool:
        for index in range(40):
            pool.submit(found.measured.add, [f"gqa {index}"], dict(REPLAYS))
    assert json.loads((tmp_path / "results.json").read_text())["replays"]["replays"] == 40 * 250
