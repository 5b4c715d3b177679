"""The benchmark tests the kernels first, and refuses to measure those whose tests fail."""

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.bench import __main__ as command
from kernels.bench import runner, testing
from kernels.bench.operations import OPERATIONS, Operation, all_cases, owner
from kernels.bench.testing import Outcome
from tests.kernels.bench_support import (
    CEILINGS,
    GREEN,
    MACHINE,
    RED,
    figures_of,
)


def _folder(tmp_path: Path, **files: str) -> Path:
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(content)
    return tmp_path


def test_tests_are_counted_by_operation(tmp_path: Path) -> None:
    many = "import pytest\n@pytest.mark.parametrize('i', range(5))\ndef test_i(i): assert i < %d\n"
    folder = _folder(
        tmp_path,
        test_good=many % 9,
        test_good_more="import pytest\ndef test_s(): pytest.skip('why')\n",
        test_plan="def test_plan(): pass\n",
        test_plan_more="def test_more(): pass\n",
        test_goodness="def test_shared(): pass\n",
        test_bad=many % 4 + "def test_ends():\n    import os\n    os._exit(7)\n",
        test_red=many % 3,
        test_bench="def test_never(): assert False\n",
    )
    said: list[str] = []
    operations = [
        Operation("good", shards=2),
        Operation("red", requires=("plan",)),
        Operation("bad"),
    ]
    found = testing.run(operations, time.time() + 60, say=said.append, folder=folder, workers=4)
    assert set(found) == {"good", "goodness", "plan", "red", "bad"}
    assert found["plan"].passed == 2
    assert (found["good"].passed, found["good"].failed, found["good"].skipped) == (5, 0, 1)
    assert found["good"].green
    assert found["goodness"].green
    assert (found["red"].passed, found["red"].failed) == (3, 2)
    assert sorted(name for name, _ in found["red"].failures) == ["test_i[3]", "test_i[4]"]
    assert "assert 3 < 3" in dict(found["red"].failures)["test_i[3]"]
    # A process that dies within a test has failed, whatever passed before.
    assert not found["bad"].green
    assert "code 7" in found["bad"].failures[0][1]
    assert len(said) == 5


def test_tests_that_do_not_end_have_failed(tmp_path: Path) -> None:
    folder = _folder(tmp_path, test_slow="import time\ndef test_t(): time.sleep(60)\n")
    start = time.monotonic()
    found = testing.run([], time.time() + 3, say=lambda _: None, folder=folder)
    assert time.monotonic() - start < 20
    assert "did not end in time" in found["slow"].failures[0][1]
    assert not found["slow"].green


def test_a_test_file_belongs_to_the_operation_it_names() -> None:
    names = ["paged", "paged_decode", "rotary"]
    files = {
        "test_paged_decode.py": "paged_decode",
        "test_paged_decode_properties.py": "paged_decode",
        "test_paged_x.py": "paged",
        "test_rotaryx.py": "rotaryx",
        "paged_decode/test_x.py": "paged_decode",
        "other/test_paged.py": "other",
    }
    assert {file: owner(Path(file), names) for file in files} == files


def test_an_operation_is_refused_for_its_own_tests_and_those_it_needs() -> None:
    operation = Operation("paged", requires=("plan",))
    assert testing.refusals(operation, {"paged": GREEN, "plan": GREEN}) is None
    refusals = {
        "tests of paged: 1 failed": {"paged": RED, "plan": GREEN},
        "tests of plan: 1 failed": {"paged": GREEN, "plan": RED},
        "tests of paged: none passed": {"paged": Outcome(skipped=3), "plan": GREEN},
        "tests of plan: none passed": {"paged": GREEN},
    }
    for reason, tests in refusals.items():
        assert testing.refusals(operation, tests) == reason


def test_required_operations_have_tests() -> None:
    named = {path.name for path in testing.TESTS.iterdir()}
    for operation in OPERATIONS:
        for name in (operation.name, *operation.requires):
            assert {f"test_{name}.py", name} & named


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "machine", lambda: MACHINE)
    monkeypatch.setattr(runner, "compiling", lambda *_: nullcontext())


def _all_tests(**others: Outcome) -> dict[str, Outcome]:
    names = {name for o in OPERATIONS for name in (o.name, *o.requires)}
    return {**dict.fromkeys(names, GREEN), **others}


@pytest.mark.usefixtures("a_gpu")
def test_a_red_operation_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(keys: Sequence[str], *_: Any, **__: Any) -> runner.Figures:
        measured.extend(keys)
        return runner.Figures(CEILINGS, {key: figures_of(1.0, bytes=10) for key in keys})

    monkeypatch.setattr(runner, "measure", measure)
    monkeypatch.setattr(testing, "run", lambda *_, **__: _all_tests(rms_norm=RED))
    file = tmp_path / "results.json"
    assert command.main(["--json", str(file)]) == 1
    assert not [key for key in measured if key.startswith("rms_norm ")]
    rows = json.loads(file.read_text())["cases"]
    assert {row["status"] for row in rows if row["operation"] == "rms_norm"} == {"refused"}
    assert all("micros" not in row for row in rows if row["operation"] == "rms_norm")
    out = capsys.readouterr().out
    assert "FAILED rms_norm: test_x: assert 1 == 2" in out
    assert "refused: tests of rms_norm: 1 failed" in out

    monkeypatch.setattr(testing, "run", lambda *_, **__: _all_tests())
    assert command.main([]) == 0
    assert set(measured) == {case.key for case in all_cases()}
    monkeypatch.setattr(testing, "run", lambda *_, **__: _all_tests(checks=RED))
    assert command.main([]) == 1


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "INTERPRETED", True)
    assert command.main([]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().out
    monkeypatch.setattr(command, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out
