"""One run: ceilings, tests in parallel processes, then the figures of each group in turn."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from engine.bench import ceilings
from engine.bench.gpu.part import Figures, Group
from engine.bench.gpu.report import Report
from engine.bench.gpu.worker import device, groups, measure
from engine.launch.worker_process import WorkerProcess

ROOT = Path(__file__).parents[3]
REPLAYED = ("gqa", "vocab", "fp8", "window")  # labels of `tests.gpu.replays.models`

# Of the time that is left as a stage begins; the rest is for those after it.
_SHARE = 0.5
_LEAST_S = 5.0  # no stage begins if less is left
_HUNG_S = 150.0  # longer than any part takes, with compilation
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # transformers must not look for kernels on the hub
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of processes for the one kernel of a case
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONUNBUFFERED": "1",  # a log has all until a process dies, or is ended
}
# Without the repository's configuration, which needs plugins.
_PYTEST = (
    *("-v", "-rfE", "--tb=short", "-c", os.devnull, "--rootdir", str(ROOT)),
    *("--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:warnings"),
)


class Run:
    """One run of the command, with the parsed `options` of its command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._started = time.time()
        self._end: float = self._started + 60 * options.minutes
        options.out.mkdir(parents=True, exist_ok=True)
        self._groups = [g for g in groups(tiny=options.tiny) if g.kind in options.only]
        self.report = Report(options.out, judged=not options.tiny)

    def all(self) -> int:
        """Run all stages; return 0, or 1 if something failed."""
        child = self._child("ceilings")  # first: tests that were ended may still be on the GPU
        child.start(ceilings.measure, device())
        with suppress(ChildProcessError):
            self.report.ceilings = child.result(max(self._end - time.time(), 0))
            child.end()
        if "tests" in self._options.only:
            self._test()
        for group in self._groups:
            self._measure(group, self._end if group is self._groups[-1] else self._deadline())
        print(self.report.write())
        return int(self.report.faulty)

    def _say(self, text: str) -> None:
        print(f"[{time.time() - self._started:5.1f} s] {text}", flush=True)

    def _log(self, name: str) -> Path:
        return Path(self._options.out) / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"

    def _child(self, name: str) -> WorkerProcess:
        with self._log(name).open("a") as log:
            path = os.pathsep.join(filter(None, sys.path))  # what this process finds
            return WorkerProcess(log, environ={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path})

    def _deadline(self) -> float:
        now = time.time()
        return now + _SHARE * (self._end - now)

    def _test(self) -> None:
        """Run each file of tests in a process, as many at once as there are cores."""
        test_file = partial(self._test_file, self._deadline())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(test_file, files_of_tests(tiny=self._options.tiny)):
                self.report.write()

    def _test_file(self, deadline: float, arguments: Sequence[str]) -> None:
        name = " ".join(arguments).removeprefix("tests/")
        if deadline - time.time() < _LEAST_S:
            self.report.tests[name] = ["no time was left"]
            return
        self._log(name).unlink(missing_ok=True)
        import pytest  # what measures alone needs none

        child, died = self._child(name), ""
        file, *some = arguments
        child.start(pytest.main, [*_PYTEST, str(ROOT / file), *some])
        try:
            if (status := child.result(deadline - time.time())) not in (0, 1, 5):
                died = f"pytest ended with {status}"  # 5: all of its tests were left out
            child.end()
        except ChildProcessError as error:
            died = str(error)
        lines = self._log(name).read_text(errors="replace").splitlines() or [""]
        failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        begun = next((line for line in reversed(lines) if "::" in line), "")
        if died and time.time() >= deadline:
            lines.append(f"no time was left after {begun}")
        elif died:
            failures.append(f"FAILED {name}: {died}: {begun}")
            lines.append(died)
        self.report.tests[name] = [lines[-1].strip("= "), *failures]
        self._say(f"{name}: {self.report.tests[name][0]}")

    def _measure(self, group: Group, deadline: float) -> None:
        """Measure a group in a process, and in another one if it faults or hangs."""
        child = self._child(group.name)
        for part in group.parts:
            figures: Figures = {"left_out": "no time was left"}
            if (left := deadline - time.time()) > _LEAST_S:
                limits = self.report.ceilings
                child.start(measure, group.name, self._options.tiny, part.key, limits)
                try:
                    figures = child.result(min(_HUNG_S, left + 15))
                except ChildProcessError as error:
                    lines = self._log(group.name).read_text(errors="replace").splitlines() or [""]
                    figures = {"reason": f"{error}: {lines[-1][:200]}"}
                    child = self._child(group.name)
                self._say(f"{part.key}: {figures.get('reason', 'measured')}")
            self.report.figures[part.key] = {"key": part.key, **figures}
            self.report.write()
        child.end()


def files_of_tests(*, tiny: bool) -> list[list[str]]:
    """Return what each process of tests is given: a file, or the replays of a model."""
    if tiny:
        return [["tests/gpu/test_cancel.py", "-k", "ahead"]]  # takes seconds on a CPU
    files = [
        str(path.relative_to(ROOT))
        for pattern in ("gpu/test_*.py", "kernels/**/test_*.py")
        for path in sorted((ROOT / "tests").glob(pattern))
        if not path.name.startswith("test_bench")  # of the cases, which run in the interpreter
    ]
    replays = "tests/gpu/test_replays.py"
    files.remove(replays)
    halves = [f"{label} and {half}" for label in REPLAYED for half in ("first", "second")]
    return [*([replays, "-k", half] for half in halves), *([file] for file in files)]
