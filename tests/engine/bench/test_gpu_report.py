"""The report holds figures against floors, aims and torch, and names what is missing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.bench.gpu.part import Figures
from engine.bench.gpu.plan import groups
from engine.bench.gpu.report import Report

CEILINGS = {"status": "measured", "read": 4.3e12, "bf16": 790e12}
RED = {"status": "failed", "reason": "1 != 2", "details": "a traceback"}
REPLAYS = {"status": "measured", "seconds": 1.0, "unequal": [], "kinds": {"decode": 9, "mixed": 1}}


def report(folder: Path, figures: dict[str, Figures], *, judged: bool = True) -> Report:
    found = Report(groups(tiny=False), folder, judged=judged)
    found.figures = {"ceilings": CEILINGS, **figures}
    return found


def cells(found: Report, key: str) -> list[str]:
    """Return the cells of a part's row, after its name."""
    row = next(line for line in found.text().splitlines() if line.startswith(f"| {key} "))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def measured(seconds: float, **others: Any) -> Figures:
    return {"status": "measured", "seconds": seconds, **others}


def test_figures_are_held_against_floors_aims_and_torch(tmp_path: Path) -> None:
    norm = {
        "bytes": 36_000_000,
        "flops": 0,
        "kernels": ["rms_norm._kernel: 168 registers, 0 spilled"],
        "peers": {"slow": {"seconds": 40e-6}, "fast": {"seconds": 30e-6}, "x": {"reason": "no"}},
    }
    prefill = {"bytes": 0, "flops": 800_000_000_000, "kernels": [], "peers": {}}
    found = report(
        tmp_path,
        {
            "8b decode step, B = 1": measured(4e-3, tokens_per_second=250.0, context=1024.0),
            "8b decode step, B = 256": measured(20e-3, tokens_per_second=12800.0, context=1024.0),
            "0.5b decode step, B = 1": measured(0.59e-3, tokens_per_second=1695.0, context=1024.0),
            "8b offline, 64 sequences": measured(2.0, tokens_per_second=1000.0),
            "8b transformers continuous batching, 64 sequences": measured(20.0),
            "0.5b offline, 64 sequences": measured(2.0, tokens_per_second=1000.0),
            "rms_norm add 8b 8192": measured(20e-6, **norm),
            "paged_prefill 8b 8 x 1k": measured(2e-3, **prefill),
        },
    )
    blank = [""] * 3
    decode = cells(found, "8b decode step, B = 1")
    assert decode == ["4.00", "250 tok/s", "3.52", "88%", *blank, ">= 85%", "met"]
    assert cells(found, "8b decode step, B = 256")[3:] == ["64%", *blank, ">= 75%", "MISSED"]
    assert cells(found, "0.5b decode step, B = 1")[-2:] == ["<= 0.6 ms", "met"]
    offline = cells(found, "8b offline, 64 sequences")
    assert offline[-5:] == ["transformers", "20,000.00", "10.00x", ">= 5x", "met"]
    # Nothing to compare with is no miss.
    assert cells(found, "0.5b offline, 64 sequences")[-2:] == [">= 5x", ""]
    assert cells(found, "rms_norm add 8b 8192") == [
        *("0.0200", "1800 GB/s", "0.0084", "42%", "fast", "0.0300", "1.50x", ">= 85%", "MISSED")
    ]
    assert cells(found, "paged_prefill 8b 8 x 1k")[1:4] == ["400 TF/s", "1.01", "51%"]
    lines = found.text().splitlines()
    assert lines[-1] == "Aims: 3 met, 2 missed."
    assert "rms_norm add 8b 8192: x: no" in lines
    assert "rms_norm add 8b 8192: rms_norm._kernel: 168 registers, 0 spilled" in lines


def test_what_is_missing_is_named_and_written(tmp_path: Path) -> None:
    found = report(
        tmp_path,
        {
            "8b decode step, B = 1": {"status": "failed", "reason": "OutOfMemoryError: x"},
            "gqa replays, episodes 0 to 9": {**REPLAYS, "unequal": ["gqa:1:2: x"]},
        },
    )
    found.tests = {"test_a.py::test_x": RED, "test_a.py::test_y": {"status": "passed"}}
    found.write()
    text = (tmp_path / "report.md").read_text()
    for line in (
        "8b decode step, B = 1: failed: OutOfMemoryError: x",
        "UNEQUAL gqa replays, episodes 0 to 9: gqa:1:2: x",
        "FAILED test_a.py::test_x: 1 != 2",
        "Tests: 1 failed, 1 passed.",
        "Steps replayed: 9 decode, 1 mixed; with other bits: 1.",
    ):
        assert f"{line}\n" in text
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["figures"] == found.figures
    assert "test_a.py::test_x\na traceback" in (tmp_path / "failures.txt").read_text()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("figures", "test", "faulty"),
    [
        (measured(1.0), "passed", False),
        (measured(1.0), "failed", True),
        ({"status": "left out", "reason": ""}, "passed", False),
        ({"status": "refused", "reason": ""}, "passed", True),
        ({"status": "failed", "reason": ""}, "passed", True),
        (measured(1.0, peers={"torch": {"differs": "shapes"}}), "passed", True),
        ({**REPLAYS, "unequal": ["gqa:1:2: x"]}, "passed", True),
    ],
)
def test_faults(figures: Figures, test: str, faulty: bool, tmp_path: Path) -> None:
    found = report(tmp_path, {"x": figures})
    found.add_test("test_x", {**RED, "status": test})
    assert found.faulty is faulty


def test_a_tiny_model_is_not_judged(tmp_path: Path) -> None:
    key = "8b decode step, B = 256"
    found = report(tmp_path, {key: measured(0.02, context=1024.0)}, judged=False)
    assert cells(found, key)[-2:] == ["", ""]
    assert found.text().endswith("all this shows is that everything ran.")


def test_figures_of_several_threads_are_written_one_after_the_other(tmp_path: Path) -> None:
    found = report(tmp_path, {})
    with ThreadPoolExecutor(8) as pool:
        for index in range(40):
            pool.submit(found.add, [f"gqa {index}"], dict(REPLAYS))
    assert json.loads((tmp_path / "results.json").read_text())["replays"]["decode"] == 40 * 9


LLAMA, KERNEL = "8b decode step, B = 1", "paged_decode 8b 64 x 1k"


@pytest.mark.parametrize(
    ("key", "tests", "reason"),
    [
        (LLAMA, {}, None),
        (LLAMA, {"gpu/test_parity.py::test_x[cuda]": "passed"}, None),
        (LLAMA, {"gpu/test_parity.py::test_x[cuda-qwen3]": "failed"}, None),
        (LLAMA, {"gpu/test_parity.py::test_x[cuda-llama]": "failed"}, "[cuda-llama] failed"),
        (LLAMA, {"gpu/test_modes.py::test_x[cuda]": "failed"}, "test_x[cuda] failed"),
        (LLAMA, {"gpu/test_parity.py::test_x": "skipped"}, "no test of it has passed"),
        (LLAMA, {"gpu/test_cancel.py::test_x": "failed"}, None),
        (LLAMA, {"kernels/test_rotary.py::test_x": "failed"}, None),
        (KERNEL, {"kernels/test_paged_decode_sinks.py::test_x": "failed"}, "test_x failed"),
        (KERNEL, {"kernels/test_split_plan.py::test_x": "failed"}, "test_x failed"),
        (KERNEL, {"kernels/test_paged_decode.py::test_x": "passed"}, None),
        (KERNEL, {"gpu/test_parity.py::test_x": "failed"}, None),
    ],
)
def test_a_failure_refuses_what_it_is_about(
    key: str, tests: dict[str, str], reason: str | None, tmp_path: Path
) -> None:
    found = report(tmp_path, {})
    found.tests = {f"tests/{test}": {"status": status} for test, status in tests.items()}
    group = next(group for group in groups(tiny=False) if key in group.keys)
    refusal = found.refusal(group, key)
    assert refusal is None if reason is None else refusal is not None and refusal.endswith(reason)
