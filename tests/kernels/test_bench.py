"""The benchmark's frame: what it runs, what it refuses, how it goes on, what it prints."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.bench import __main__ as command
from kernels.bench import runner, testing, timing, worker
from kernels.bench.case import Aim, Case, Work
from kernels.bench.operations import OPERATIONS, Operation, all_cases, owner
from kernels.bench.report import Report
from kernels.bench.resources import Multiprocessor
from kernels.bench.testing import Outcome
from kernels.bench.worker import Bench
from tests.kernels.support import DEVICE

MACHINE: dict[str, str | None] = {"gpu": "none", "driver": None}
CEILINGS: dict[str, float | None] = {"copy_gb_s": 4000.0, "bf16_tflop_s": 800.0}
GREEN = Outcome(passed=3, skipped=1, seconds=2.0)
RED = Outcome(passed=2, failed=1, failures=[("test_x", "assert 1 == 2")])


def _case(name: str, aim: Aim | None = None, operation: str = "rms_norm") -> Case:
    return Case(operation, name, _work, {"size": 4}, {}, aim)


def _work(size: int, device: torch.device) -> Work:
    x = torch.ones(size, device=device)
    return Work(
        ours=partial(torch.neg, x),
        peers={"same": partial(torch.neg, x), "other": partial(torch.neg, x * 2)},
        compiled={"compiled": partial(torch.neg, x)},
        bytes=4 * size,
    )


def _figures(micros: float, **others: Any) -> dict[str, Any]:
    return {
        "status": "measured",
        "micros": micros,
        "bytes": 0,
        "flops": 0,
        "peers": {},
        "kernels": [],
        **others,
    }


def _report(*cases: tuple[Case, dict[str, Any]], tests: Outcome = GREEN) -> Report:
    return Report(MACHINE, CEILINGS, {"rms_norm": tests}, cases)


# The tests of the kernels


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
        test_goodness="def test_shared(): pass\n",
        test_bad=many % 4 + "def test_ends():\n    import os\n    os._exit(7)\n",
        test_red=many % 3,
        test_bench="def test_never(): assert False\n",
    )
    said: list[str] = []
    operations = [Operation("good", shards=2), Operation("red"), Operation("bad")]
    found = testing.run(operations, time.time() + 60, say=said.append, folder=folder, workers=4)
    assert set(found) == {"good", "goodness", "red", "bad"}
    assert (found["good"].passed, found["good"].failed, found["good"].skipped) == (5, 0, 1)
    assert found["good"].green
    assert found["goodness"].green
    assert (found["red"].passed, found["red"].failed) == (3, 2)
    assert sorted(name for name, _ in found["red"].failures) == ["test_i[3]", "test_i[4]"]
    assert "assert 3 < 3" in dict(found["red"].failures)["test_i[3]"]
    # Whose process ends within a test has failed, whatever passed before.
    assert not found["bad"].green
    assert "code 7" in found["bad"].failures[0][1]
    assert len(said) == 4


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


# Measuring


class _Watch:
    def micros(self, call: Any, *, graph: bool) -> float:
        assert graph
        call()
        return 10.0


class _Gpu:
    """Stands in for torch.cuda: calls and readings of the lines take a time each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[str] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def elapsed_time(self, end: "Event") -> float:
                return end.at - self.at

        class Graph:
            def replay(self) -> None:
                gpu.run("call", 0.25)

            def reset(self) -> None:
                gpu.log.append("reset")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run(self, name: str, millis: float) -> None:
        # Now and then the GPU is late, which a median does not show.
        self.now += millis + (5 if len(self.log) % 31 == 30 else 0)
        self.log.append(name)

    def amax(self) -> None:
        self.run("flush", 0.06)


def test_the_stopwatch_empties_the_cache_before_each_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = _Gpu(monkeypatch)
    watch = object.__new__(timing.Stopwatch)
    watch._lines = gpu  # type: ignore[assignment]
    assert watch.micros(partial(gpu.log.append, "captured")) == pytest.approx(250)
    assert gpu.log[0] == "captured"
    assert gpu.log[-1] == "reset"
    replays = gpu.log[1:-1]
    assert set(replays[::2]) == {"flush"}
    assert set(replays[1::2]) == {"call"}
    assert len(replays) / 2 > 100


def test_the_stopwatch_keeps_the_gpu_busy_while_the_host_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = _Gpu(monkeypatch)
    watch = object.__new__(timing.Stopwatch)
    watch._lines = gpu  # type: ignore[assignment]

    def call() -> None:
        time.sleep(0.001)
        gpu.run("call", 0.25)

    assert watch.micros(partial(call), graph=False) == pytest.approx(250)
    calls = [i for i, name in enumerate(gpu.log) if name == "call"]
    assert calls[2] - calls[1] > 1000 / 60  # readings between them outlast a launch of 1 ms


def test_a_form_that_computes_something_else_gets_no_figure() -> None:
    figures = Bench(_Watch(), DEVICE).measure(_case("a"))
    assert figures["status"] == "measured"
    assert figures["micros"] == 10
    assert figures["bytes"] == 16
    assert figures["peers"]["same"] == {"micros": 10}
    assert "relative RMS" in figures["peers"]["other"]["differs"]
    assert "compiled" not in figures["peers"]


def test_what_fails_is_no_figure() -> None:
    def build(device: torch.device) -> Work:
        raise RuntimeError("no such thing\nand more")

    case = Case("rms_norm", "a", build, {}, {})
    figures = Bench(_Watch(), DEVICE).measure(case)
    assert figures == {"status": "failed", "reason": "RuntimeError: no such thing"}

    def too_large(device: torch.device) -> Work:
        raise torch.OutOfMemoryError("99 GiB")

    case = Case("rms_norm", "a", too_large, {}, {})
    assert Bench(_Watch(), DEVICE).measure(case)["status"] == "skipped"


_WORKER = """
import json, sys, time
request = json.load(sys.stdin)
say = lambda **message: print("@@ " + json.dumps(message), flush=True)
if request["ceilings"]:
    say(ceilings={"copy_gb_s": 1.0})
print("noise")
for key in request["cases"]:
    say(begins=key)
    if "hang" in key:
        time.sleep(60)
    if "die" in key:
        sys.exit("illegal memory access")
    say(case=key, status="measured", micros=1.0)
"""


def _measure(keys: Sequence[str], program: str = _WORKER) -> tuple[runner.Figures, list[str]]:
    said: list[str] = []
    start = (sys.executable, "-c", program)
    figures = runner.measure(keys, 0.0, say=said.append, command=start, silence=2.0)
    return figures, said


def test_measuring_goes_on_after_a_fault_and_after_a_hang() -> None:
    figures, said = _measure(["a", "die", "b", "hang", "c"])
    assert figures.ceilings == {"copy_gb_s": 1.0}
    assert {key for key, found in figures.cases.items() if found["status"] == "measured"} == {
        *"abc"
    }
    assert figures.cases["die"] == {
        "status": "failed",
        "reason": "the measuring process ended with code 1: illegal memory access",
    }
    assert figures.cases["hang"]["reason"] == "nothing was heard for 2 s"
    assert sum("in a new process" in line for line in said) == 2


def test_a_process_that_cannot_measure_is_not_started_for_ever() -> None:
    figures, _ = _measure(["a", "b"], "raise SystemExit('no GPU')")
    assert set(figures.cases) == {"a", "b"}
    for found in figures.cases.values():
        assert found["status"] == "failed"
        assert "no GPU" in found["reason"]


def test_kernels_are_compiled_meanwhile(tmp_path: Path) -> None:
    program = (
        "import json, pathlib, sys, time\n"
        "request = json.load(sys.stdin)\n"
        "assert request['compile_only']\n"
        "time.sleep(60 if 'hang' in request['cases'] else 0.1)\n"
        f"(pathlib.Path({str(tmp_path)!r}) / request['cases'][0]).touch()\n"
    )
    start = time.monotonic()
    with runner.compiling(
        [["a"], ["hang"], ["b"]], time.time() + 3, command=(sys.executable, "-c", program)
    ):
        pass
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b"}
    assert time.monotonic() - start < 20


def test_compiling_a_case_that_fails_goes_on_to_the_next() -> None:
    called: list[int] = []

    def build(fails: bool, device: torch.device) -> Work:
        assert not fails
        return Work(ours=partial(called.append, 1))

    cases = [Case("x", "y", build, {"fails": fails}, {}) for fails in (False, True, False)]
    worker.compile_kernels(cases, DEVICE)
    assert called == [1, 1]


def test_occupancy_is_bound_by_threads_registers_and_shared_memory() -> None:
    hopper = Multiprocessor(threads=2048, registers=65536, shared=233_472)
    assert hopper.warps(num_warps=4, registers=32, shared=0) == 64
    assert hopper.warps(num_warps=4, registers=255, shared=0) == 8
    assert hopper.warps(num_warps=4, registers=33, shared=0) == 48  # 40 registers each, in fours
    assert hopper.warps(num_warps=8, registers=64, shared=100 * 1024) == 16
    assert hopper.warps(num_warps=8, registers=64, shared=227 * 1024) == 8


# The report


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
    report = _report(
        (_case("near", Aim(share=0.85)), _figures(10.0, bytes=36_000_000, peers=peers)),
        (_case("far", Aim(share=0.85)), _figures(20.0, bytes=36_000_000, kernels=[kernel])),
        (_case("sum"), _figures(2000.0, flops=800_000_000_000)),
        (_case("long"), {"status": "left out", "reason": "no time was left"}),
    )
    lines = report.lines()
    rows = {line.split()[1]: line.split() for line in lines if line.startswith("rms_norm ")}
    assert rows["near"][2:] == [
        *("10.0", "3600", "GB/s", "90%", "fast", "15.0", "1.50x", ">=", "85%", "met")
    ]
    assert rows["far"][2:] == ["20.0", "1800", "GB/s", "45%", ">=", "85%", "MISSED"]
    assert rows["sum"][2:] == ["2000", "400", "TF/s", "50%"]
    text = "\n".join(lines)
    assert "rms_norm near: broken: NotImplementedError: no" in text
    assert "rms_norm long: left out: no time was left" in text
    assert "rms_norm far: x.f: 168 registers, 0 spilled, 1024 B shared, 4 warps, 3 stages; " in text
    assert "aims: 1 met, 1 missed" in text
    assert "copy_gb_s 4000" in text
    assert not report.faulty
    header = next(line for line in lines if line.startswith("operation"))
    column = header.index("share") + len("share")
    table = [line for line in lines if line.startswith("rms_norm ") and "/s" in line]
    assert [line[:column].split()[-1] for line in table] == ["90%", "45%", "50%"]


def test_resources_are_listed_for_an_operation_asked_for() -> None:
    kernel = dict.fromkeys(("registers", "spills", "shared", "num_warps", "num_stages"), 1)
    kernel |= {"kernel": "x.f", "resident_warps": 1, "most_warps": 1}
    report = _report((_case("a"), _figures(1.0, kernels=[kernel])))
    assert "x.f" not in "\n".join(report.lines())
    assert "x.f" in "\n".join(report.lines(profile=["rms_norm"]))


def test_the_file_holds_everything(tmp_path: Path) -> None:
    report = _report(
        (_case("a", Aim(share=0.5)), _figures(10.0, bytes=36_000_000)),
        (_case("b"), {"status": "refused", "reason": "tests of rms_norm: 1 failed"}),
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
        (_figures(1.0), RED),
        ({"status": "refused", "reason": ""}, GREEN),
        ({"status": "failed", "reason": ""}, GREEN),
        (_figures(1.0, peers={"torch": {"differs": "shapes"}}), GREEN),
    ],
    ids=["red", "refused", "failed", "disputed"],
)
def test_faults(figures: dict[str, Any], tests: Outcome) -> None:
    assert _report((_case("a"), figures), tests=tests).faulty


# The command


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
        return runner.Figures(CEILINGS, {key: _figures(1.0, bytes=10) for key in keys})

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
