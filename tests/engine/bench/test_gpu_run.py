"""The run on a GPU: what fails, dies or hangs is told, and all else is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bench import ceilings
from engine.bench.__main__ import main
from engine.bench.gpu import run, worker
from engine.bench.gpu.engine import SMALL, EngineSession
from engine.bench.gpu.kernels import KernelSession
from engine.bench.gpu.part import Figures
from engine.bench.gpu.report import Report
from engine.bench.gpu.run import REPLAYED, ROOT, files_of_tests
from engine.bench.gpu.worker import groups
from engine.bench.kernels.case import Call, Case, Work
from tests.engine.bench import fakes
from tests.gpu.replays.models import models

CPU = torch.device("cpu")
ENGINE = groups(tiny=True)[0]
KEYS = [part.key for part in ENGINE.parts]
LIMITS = {"read": 1e10, "bf16": 1e12}


def figures_of_engine() -> dict[str, Figures]:
    return {key: worker.measure(ENGINE.name, True, key, LIMITS) for key in KEYS}


def test_every_part_of_the_engine_is_measured() -> None:
    found = figures_of_engine()
    assert all(each["floor"] > 0 for each in found.values())
    for batch in SMALL.batches:
        figures = found[f"tiny decode step, B = {batch}"]
        # Sequences that were computed first have got tokens while the last ones were.
        assert 0 <= figures["context"] - SMALL.context <= batch
        assert figures["tokens_per_second"] == pytest.approx(batch / figures["seconds"])


def test_a_part_that_fails_leaves_the_engine_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(session: EngineSession, batch: int) -> Figures:
        session.add(session.prompts([3], seed=0))
        session.core.step()
        raise RuntimeError("broken\nand more")

    # Parts hold the functions of the class.
    monkeypatch.setattr(EngineSession.decode, "__code__", broken.__code__)
    for key, figures in figures_of_engine().items():
        assert figures.get("reason") == ("RuntimeError: broken" if "decode" in key else None)


def _case(**fields: Any) -> Case:
    def build(device: torch.device) -> Work:
        x = torch.ones(4, device=device)
        peers = {"same": Call(torch.neg, x), "other": Call(torch.neg, x * 2)}
        return Work(Call(torch.neg, x), peers, compiled=Call(torch.neg, x), bytes=16)

    return Case("rms_norm", "a", build, {}, {}, **fields)


def test_a_form_that_computes_something_else_gets_no_figure() -> None:
    session = KernelSession(CPU)
    figures = session.measure(_case())
    assert figures["seconds"] > 0
    assert figures["bytes"] == 16
    assert figures["peers"]["same"]["seconds"] > 0
    assert "relative RMS" in figures["peers"]["other"]["differs"]
    assert "torch.compile" not in figures["peers"]
    session._compile_seconds = 0.0
    assert "were over" in session.measure(_case(compile=True))["peers"]["torch.compile"]["reason"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "measure", fakes.ceilings)
    monkeypatch.setattr(run, "measure", fakes.measure)


PASSES = "def test_x(): pass\n"
FAILS = "def test_y():\n    assert 1 == 2\n"
SLEEPS = "import time\ndef test_s(): time.sleep(60)\n"
DIES = "import os\ndef test_z():\n    print('last words', flush=True); os.abort()\n"


def test_what_fails_dies_or_hangs_leaves_all_else(
    fake: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, text in {"passes": PASSES, "fails": PASSES + FAILS, "dies": DIES}.items():
        file = tmp_path / f"test_{name}.py"
        file.write_text(text)
        files.append([str(file)])
    monkeypatch.setattr(run, "files_of_tests", lambda tiny: files)
    monkeypatch.setattr(run, "_HUNG_S", 2.0)
    out = tmp_path / "out"
    assert main(["--tiny", "--only", "tests", "engine", "--out", str(out)]) == 1
    content = json.loads((out / "results.json").read_text())
    passes, fails, dies = (content["tests"][file] for (file,) in files)
    assert len(passes) == 1
    assert "1 passed" in passes[0]
    assert "1 failed, 1 passed" in fails[0]
    assert "::test_y - assert 1 == 2" in fails[1]
    assert dies[0] == "its process ended with -6"
    assert "::test_z" in dies[1]
    figures = content["figures"]
    assert [figures[key].get("seconds") for key in KEYS] == [1.0, None, None, None, 1.0]
    assert "ended with -9" in figures[KEYS[1]]["reason"]
    assert "ended with -6" in figures[KEYS[2]]["reason"]
    assert "ended with 1: RuntimeError: no such luck" in figures[KEYS[3]]["reason"]
    assert f"{KEYS[1]}: its process ended" in (out / "report.md").read_text()
    assert capsys.readouterr().out.endswith("all this shows is that everything ran.\n")


def test_what_has_no_time_left_is_told(fake: None, tmp_path: Path) -> None:
    assert main(["--tiny", "--minutes", "0.01", "--only", "engine", "--out", str(tmp_path)]) == 0
    assert f"{KEYS[0]}: no time was left" in (tmp_path / "report.md").read_text()


def test_what_runs_at_the_end_of_the_time_has_not_failed(
    fake: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "test_sleeps.py"
    file.write_text(SLEEPS)
    monkeypatch.setattr(run, "files_of_tests", lambda tiny: [[str(file)]])
    monkeypatch.setattr(run, "_LEAST_S", 0.0)
    assert main(["--tiny", "--minutes", "0.1", "--only", "tests", "--out", str(tmp_path)]) == 0
    assert "no time was left after ::test_s" in (tmp_path / "report.md").read_text()


def test_every_file_of_tests_is_run() -> None:
    found = files_of_tests(tiny=False)
    assert {file for file, *_ in found if "/gpu/" in file} == {
        f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")
    }
    assert ["tests/kernels/sampling/test_draw.py"] in found
    assert set(REPLAYED) == models().keys()


def test_without_a_gpu_only_the_tiny_model_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_parts_have_names_of_their_own_and_the_ceilings_are_measured() -> None:
    keys = [part.key for group in groups(tiny=False) for part in group.parts]
    assert len(set(keys)) == len(keys) > 100
    assert ceilings.measure(CPU).keys() == {"read", "bf16", "int8"}


def test_figures_are_held_against_floors_aims_and_torch(tmp_path: Path) -> None:
    report = Report(tmp_path, judged=True)
    aim = {"aim": ">= 85%", "met": False}
    peers = {"slow": {"seconds": 4e-5}, "fast": {"seconds": 3e-5}, "x": {"reason": "no"}}
    report.figures = {
        "a": {"key": "a", "seconds": 4e-3, "floor": 3.52e-3, "tokens_per_second": 250.0},
        "b": {"key": "b", "seconds": 2e-5, "floor": 8.4e-6, "bytes": 36_000_000, "flops": 0}
        | {"peers": peers, **aim},
        "c": {"key": "c", "seconds": 2e-3, "floor": None, "bytes": 0, "flops": 8 * 10**11},
    }
    lines = report.write().splitlines()
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if line[:1] == "|"][2:]
    b = ["b", "0.0200", "1800 GB/s", "0.0084", "42%", "fast", "0.0300", "1.50x", ">= 85%", "MISSED"]
    assert cells == [
        ["a", "4.00", "250 tok/s", "3.52", "88%", *[""] * 5],
        b,
        ["c", "2.00", "400 TF/s", *[""] * 7],
    ]
    assert lines[-1] == "Aims: 0 met, 1 missed."
    assert "b: x: no" in lines
    assert not report.faulty
    report.figures["b"]["peers"]["x"] = {"differs": "shapes"}
    assert report.faulty
