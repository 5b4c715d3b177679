"""One run: its stages in turn, each with a time limit, and their results as they come."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from engine.bench.gpu.engine import REQUIRED
from engine.bench.gpu.packages import ROOT
from engine.bench.gpu.part import Figures, Group
from engine.bench.gpu.plan import groups
from engine.bench.gpu.report import Report
from engine.bench.gpu.supervisor import Supervisor, left_out, meanwhile

# Of the time that is left as a stage begins; the rest is for those after it.
_SHARES = {"tests": 0.38, "replays": 0.25}
_SHARE = 0.5  # of the others
_LEAST_S = 5.0  # no stage begins if less is left
_HUNG_S = 100.0  # longer than any test takes, with compilation
_COMPILING = 8  # processes that share the kernels' cases


class Run:
    """One run of the command, with the parsed `options` of its command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._started = time.time()
        self._end = self._started + 60 * options.minutes
        options.out.mkdir(parents=True, exist_ok=True)
        self._progress: Path = options.out / "progress.txt"
        self._progress.write_text("")
        self._groups = [each for each in groups(tiny=options.tiny) if self._asked(each.kind)]
        self.report = Report(self._groups, options.out, judged=not options.tiny)

    def say(self, text: str) -> None:
        """Print a line of progress with the time, and append it to progress.txt."""
        line = f"[{time.time() - self._started:5.1f} s] {text}"
        print(line, flush=True)
        with self._progress.open("a") as file:
            file.write(line + "\n")

    def all(self) -> int:
        """Run all stages; return 0, or 1 if something failed."""
        if "tests" in self._options.only:
            self._stage("tests", [], self._test)
        replays = [group for group in self._groups if group.kind == "replays"]
        if replays:
            self._stage("replays", replays, partial(self._measure, replays))
        for group in self._groups:
            if group.kind != "replays":
                self._stage(group.name, [group], partial(self._measure, [group]))
        self.report.write()
        print(self.report.text())
        return int(self.report.faulty)

    def _asked(self, kind: str) -> bool:
        # Floors follow from the ceilings, whatever is measured.
        return kind in self._options.only or kind == "ceilings"

    def _stage(self, name: str, groups: Sequence[Group], work: Callable[[float], None]) -> None:
        left = self._end - time.time()
        if left < _LEAST_S:
            self.say(f"{name}: no time was left")
            self.report.add([key for group in groups for key in group.keys], left_out())
            return
        seconds = _SHARES.get(name, _SHARE) * left
        self.say(f"{name}, for {seconds:.0f} s at most")
        work(time.time() + seconds)

    def _test(self, deadline: float) -> None:
        """Run the tests in parallel processes, and compile kernels of later stages meanwhile."""
        count = 1 if self._options.tiny else os.cpu_count() or 1
        files = [str(path) for path in files_of_tests(tiny=self._options.tiny)]
        worker = [sys.executable, "-m", "engine.bench.gpu.pytest_worker"]
        supervisors = [
            Supervisor(
                [*worker, f"{index}/{count}", str(ROOT), *files],
                None,
                deadline,
                self.report.add_test,
                silence=_HUNG_S,
                grace=0.0,
            )
            for index in range(count)
        ]
        ahead = meanwhile(self._ahead(), deadline)
        with nullcontext() if self._options.tiny else ahead:
            _at_once(supervisors)
        self.say(f"tests: {self.report.outcome}")

    def _ahead(self) -> list[tuple[list[str], list[str]]]:
        """Return commands that compile kernels, and the parts to compile them for."""
        found = []
        for group in self._groups:
            if group.compile is not None and not group.name.endswith(" replays 1"):
                shares = _COMPILING if group.kind == "kernels" else 1
                command = [*self._worker(group), "--compile"]
                found += [(command, group.keys[index::shares]) for index in range(shares)]
        return found

    def _measure(self, groups: Sequence[Group], deadline: float) -> None:
        """Measure groups, each in a process of its own; those of several share the GPU."""
        supervisors = []
        for group in groups:
            keys = []
            for key in group.keys:
                if reason := self.report.refusal(group, key):
                    self.report.add([key], {"status": "refused", "reason": reason})
                else:
                    keys.append(key)
            ended = partial(self._ended, group)
            supervisors.append(Supervisor(self._worker(group), keys, deadline, ended))
        _at_once(supervisors)

    def _ended(self, group: Group, key: str, figures: Figures) -> None:
        self.say(f"{group.name}: {key}: {figures['status']}")
        self.report.add([key], figures)

    def _worker(self, group: Group) -> list[str]:
        command = [sys.executable, "-m", "engine.bench.gpu.worker", group.name]
        return [*command, "--tiny"] if self._options.tiny else command


def _at_once(supervisors: Sequence[Supervisor]) -> None:
    with ThreadPoolExecutor(len(supervisors)) as pool:
        for _ in pool.map(Supervisor.run, supervisors):
            pass


def files_of_tests(*, tiny: bool) -> Iterable[Path]:
    """Return the files of tests, first those whose failures refuse most figures."""
    gpu = ROOT / "tests" / "gpu"
    if tiny:
        return [gpu / "test_cancel.py"]  # takes seconds on a CPU
    first = [gpu / name for name in REQUIRED]
    kernels = sorted((ROOT / "tests" / "kernels").rglob("test_*.py"))
    # The tests of the cases run in the interpreter.
    kernels = [path for path in kernels if not path.name.startswith("test_bench")]
    rest = [path for path in sorted(gpu.glob("test_*.py")) if path not in first]
    return [*first, *kernels, *rest]
