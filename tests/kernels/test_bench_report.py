"""The benchmark's text and JSON report for given figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.bench.case import Aim
from kernels.bench.testing import Outcome
from tests.kernels.bench_support import (
    CEILINGS,
    GREEN,
    MACHINE,
    RED,
    fake_case,
    figures_of,
    report_of,
)


def test_aims() -> None:
    assert Aim(share=0.85).met(1.0, 0.85)
    assert not Aim(share=0.85).met(1.0, 0.84)
    assert not Aim(share=0.85).met(1.0, None)
    assert Aim(micros=250).met(250.0, None)
    assert not Aim(micros=250).met(251.0, 0.99)
    assert [str(Aim(share=0.85)), str(Aim(micros=250))] == [">= 85%", "<= 250 us"]


def test_the_table_holds_figures_against_ceilings_peers_and_aims() -> None:
    peers = {
        "slow": {"micros": 40.0},
        "fast": {"micros": 15.0},
        "broken": {"reason": "NotImplementedError: no"},
    }
    kernel = {
        "kernel": "x.f",
        "registers": 168,
        "spills": 0,
        "shared": 1024,
        "num_warps": 4,
        "num_stages": 3,
        "resident_warps": 12,
        "most_warps": 64,
    }
    report = report_of(
        (fake_case("near", Aim(share=0.85)), figures_of(10.0, bytes=36_000_000, peers=peers)),
        (fake_case("far", Aim(share=0.85)), figures_of(20.0, bytes=36_000_000, kernels=[kernel])),
        (fake_case("sum"), figures_of(2000.0, flops=800_000_000_000)),
        (fake_case("long"), {"status": "left out", "reason": "no time was left"}),
    )
    lines = report.lines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("  ")}
    assert rows["near"][1:] == [
        *("10.0", "3600", "GB/s", "90%", "fast", "15.0", "1.50x", ">=", "85%", "met")
    ]
    assert rows["far"][1:] == ["20.0", "1800", "GB/s", "45%", ">=", "85%", "MISSED"]
    assert rows["sum"][1:] == ["2000", "400", "TF/s", "50%"]
    text = "\n".join(lines)
    assert "rms_norm near: broken: NotImplementedError: no" in text
    assert "rms_norm long: left out: no time was left" in text
    assert "rms_norm far: x.f: 168 registers, 0 spilled, 1024 B shared, 4 warps, 3 stages; " in text
    assert "aims: 1 met, 1 missed" in text
    assert "copy_gb_s 4000" in text
    assert not report.faulty
    header = next(line for line in lines if "best of torch" in line)
    column = header.index("share") + len("share")
    assert lines[lines.index(header) + 1] == "rms_norm"
    table = [line for line in lines if line.startswith("  ") and "/s" in line]
    assert [line[:column].split()[-1] for line in table] == ["90%", "45%", "50%"]


def test_resources_are_listed_for_an_operation_asked_for() -> None:
    kernel = dict.fromkeys(("registers", "spills", "shared", "num_warps", "num_stages"), 1)
    kernel |= {"kernel": "x.f", "resident_warps": 1, "most_warps": 1}
    report = report_of((fake_case("a"), figures_of(1.0, kernels=[kernel])))
    assert "x.f" not in "\n".join(report.lines())
    assert "x.f" in "\n".join(report.lines(profile=["rms_norm"]))


def test_the_file_holds_everything(tmp_path: Path) -> None:
    report = report_of(
        (fake_case("a", Aim(share=0.5)), figures_of(10.0, bytes=36_000_000)),
        (fake_case("b"), {"status": "refused", "reason": "tests of rms_norm: 1 failed"}),
        tests=RED,
    )
    report.write_json(tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["machine"] == MACHINE
    assert content["ceilings"] == CEILINGS
    assert content["tests"]["rms_norm"]["failures"] == [["test_x", "assert 1 == 2"]]
    first, second = content["cases"]
    assert (first["share"], first["met"], first["aim"]) == (0.9, True, ">= 50%")
    assert first["shape"] == {"size": "4"}
    assert second["status"] == "refused"
    assert report.faulty


@pytest.mark.parametrize(
    ("figures", "tests"),
    [
        (figures_of(1.0), RED),
        ({"status": "refused", "reason": ""}, GREEN),
        ({"status": "failed", "reason": ""}, GREEN),
        (figures_of(1.0, peers={"torch": {"differs": "shapes"}}), GREEN),
    ],
    ids=["red", "refused", "failed", "disputed"],
)
def test_faults(figures: dict[str, Any], tests: Outcome) -> None:
    assert report_of((fake_case("a"), figures), tests=tests).faulty
