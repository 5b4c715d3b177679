"""How the benchmark measures, and continues after a kernel crashes its process."""

import gc
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

from kernels.bench import runner, timing, worker
from kernels.bench.case import Case, Work
from kernels.bench.operations import tiny_cases
from kernels.bench.resources import Multiprocessor
from kernels.bench.worker import Bench
from tests.kernels.bench_support import (
    CEILINGS,
    fake_case,
)
from tests.kernels.support import DEVICE


class _Watch:
    def micros(self, call: Any, *, graph: bool) -> float:
        assert graph
        call()
        return 10.0


class _Gpu:
    """A fake torch.cuda: calls and L2 flushes take a fixed time each."""

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
        # Occasional delays, which a median hides.
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
    assert calls[2] - calls[1] > 1000 / 60  # flushes between them outlast a launch of 1 ms


def test_a_form_that_computes_something_else_gets_no_figure() -> None:
    figures = Bench(_Watch(), DEVICE).measure(fake_case("a"))
    assert figures["status"] == "measured"
    assert figures["micros"] == 10
    assert figures["bytes"] == 16
    assert figures["peers"]["same"] == {"micros": 10}
    assert "relative RMS" in figures["peers"]["other"]["differs"]
    assert "compiled" not in figures["peers"]


def test_a_failed_case_has_no_figure() -> None:
    def build(device: torch.device) -> Work:
        raise RuntimeError("no such thing\nand more")

    case = Case("rms_norm", "a", build, {}, {})
    figures = Bench(_Watch(), DEVICE).measure(case)
    assert figures == {"status": "failed", "reason": "RuntimeError: no such thing"}

    def too_large(device: torch.device) -> Work:
        raise torch.OutOfMemoryError("99 GiB")

    case = Case("rms_norm", "a", too_large, {}, {})
    assert Bench(_Watch(), DEVICE).measure(case)["status"] == "skipped"


def _serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **request: Any
) -> list[dict[str, Any]]:
    """Return the output of a measuring process for the cases "rms_norm a" and "b"."""
    monkeypatch.setattr(worker, "all_cases", lambda: [fake_case("a"), fake_case("b")])
    monkeypatch.setattr(timing, "Stopwatch", _Watch)
    monkeypatch.setattr(worker, "clock", lambda _: _Watch())
    monkeypatch.setattr(timing, "ceilings", lambda _: CEILINGS)
    monkeypatch.setattr(Multiprocessor, "of", lambda _: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    cases = ["rms_norm b", "rms_norm a"]
    worker.serve({"cases": cases, "compile_only": False, "ceilings": True} | request, DEVICE)
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line.removeprefix(worker.MARK)) for line in lines]


def test_a_measuring_process_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "usable", lambda: True)
    ceilings, *messages = _serve(monkeypatch, capsys, deadline=time.time() + 60)
    assert ceilings == {"ceilings": CEILINGS}
    assert messages[0] == {"begins": "rms_norm b"}
    assert [message.get("status") for message in messages] == [None, "measured"] * 2
    assert messages[3]["case"] == "rms_norm a"
    late = _serve(monkeypatch, capsys, deadline=0.0, ceilings=False)
    assert [message["status"] for message in late] == ["left out"] * 2
    assert [message["case"] for message in late] == ["rms_norm b", "rms_norm a"]


def test_a_measuring_process_ends_when_the_gpu_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault() -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    with pytest.raises(SystemExit):
        _serve(monkeypatch, capsys, deadline=time.time() + 60)
    assert "rms_norm b" in capsys.readouterr().out


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


def _measure(
    keys: Sequence[str], program: str = _WORKER, seconds: float = 60.0
) -> tuple[runner.Figures, list[str]]:
    said: list[str] = []
    start = (sys.executable, "-c", program)
    figures = runner.Figures()
    runner.measure(
        keys, time.time() + seconds, figures, say=said.append, command=start, silence=2.0, grace=1.0
    )
    return figures, said


def test_tiny_cases_are_measured_by_wall_time(capsys: pytest.CaptureFixture[str]) -> None:
    request = {"compile_only": False, "ceilings": True, "deadline": time.time() + 60}
    keys = [case.key for case in tiny_cases()][2:4]
    worker.serve({**request, "cases": keys}, torch.device("cpu"), tiny=True)
    lines = capsys.readouterr().out.splitlines()
    messages = [json.loads(line.removeprefix(worker.MARK)) for line in lines]
    assert [message["case"] for message in messages[1::2]] == keys
    assert all(message["status"] == "measured" for message in messages[1::2])


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


def test_a_process_that_outlasts_the_deadline_is_killed() -> None:
    program = _WORKER.replace(
        "time.sleep(60)", "[print(i, flush=True) or time.sleep(.1) for i in range(600)]"
    )
    start = time.monotonic()
    figures, _ = _measure(["a", "hang", "b"], program, seconds=2.0)
    assert time.monotonic() - start < 20
    assert figures.cases["a"]["status"] == "measured"
    assert figures.cases["hang"] == {"status": "failed", "reason": "it did not end in time"}
    assert figures.cases["b"] == {"status": "left out", "reason": "no time was left"}


def test_figures_are_handed_on_as_they_come() -> None:
    figures, seen = runner.Figures(), []
    figures.changed = lambda: seen.append(list(figures.cases))
    command = (sys.executable, "-c", _WORKER)
    runner.measure(["a", "b"], time.time() + 60, figures, say=print, command=command)
    assert seen[-2:] == [["a"], ["a", "b"]]


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
    command = (sys.executable, "-c", program)
    with runner.compiling([(command, [key]) for key in ("a", "hang", "b")], time.time() + 3):
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
