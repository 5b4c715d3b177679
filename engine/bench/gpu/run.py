"""One run: tests in parallel processes, then the figures of one group after the other."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Timer
from typing import IO, Any

from engine.bench.gpu.part import Figures, Group
from engine.bench.gpu.report import Report
from engine.bench.gpu.worker import CEILINGS, groups

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
}
# Without the repository's configuration, which needs plugins.
_PYTEST = (
    *(sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", "-c", os.devnull),
    *("--rootdir", str(ROOT), "--import-mode=importlib", "-p", "no:cacheprovider"),
    *("-p", "no:warnings"),
)
_WORKER = (sys.executable, "-m", "engine.bench.gpu.worker")


class Run:
    """One run of the command, with the parsed `options` of its command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._started = time.time()
        self._end: float = self._started + 60 * options.minutes
        options.out.mkdir(parents=True, exist_ok=True)
        self._groups = [g for g in groups(tiny=options.tiny) if g.kind in options.only]
        self._tiny = ["--tiny"] if options.tiny else []
        self.report = Report(options.out, judged=not options.tiny)

    def all(self) -> int:
        """Run all stages; return 0, or 1 if something failed."""
        if "tests" in self._options.only:
            self._test()
        for row in _rows([*_WORKER, CEILINGS], {}, self._end, self._log(CEILINGS)):
            self.report.ceilings = row
        for group in self._groups:
            self._measure(group)
        print(self.report.write())
        return int(self.report.faulty)

    def _say(self, text: str) -> None:
        print(f"[{time.time() - self._started:5.1f} s] {text}", flush=True)

    def _log(self, name: str) -> Path:
        return Path(self._options.out) / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"

    def _deadline(self) -> float:
        now = time.time()
        return now + _SHARE * (self._end - now)

    def _test(self) -> None:
        """Run each file of tests in a process, and compile kernels of later stages meanwhile."""
        deadline = self._deadline()
        ahead = [
            _start([*_WORKER, group.name, "--compile", f"{i}/{group.shares}"], subprocess.DEVNULL)
            for group in (() if self._tiny else self._groups)
            for i in range(group.shares)
        ]
        count = 1 if self._tiny else os.cpu_count() or 1
        with ThreadPoolExecutor(count) as pool:
            files = files_of_tests(tiny=bool(self._tiny))
            for _ in pool.map(partial(self._test_file, deadline), files):
                self.report.write()
        for process in ahead:
            _end(process, deadline)

    def _test_file(self, deadline: float, arguments: Sequence[str]) -> None:
        name = " ".join(arguments).removeprefix("tests/")
        if deadline - time.time() < _LEAST_S:
            self.report.tests[name] = ["no time was left"]
            return
        log = self._log(name)
        with log.open("w") as out:
            status = _end(_start([*_PYTEST, *arguments], out), deadline)
        lines = log.read_text(errors="replace").splitlines() or [""]
        failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        begun = next((line for line in reversed(lines) if "::" in line), "")
        if status is None:
            lines.append(f"no time was left after {begun}")
        elif status not in (0, 1, 5):  # 5: all of its tests were left out
            failures.append(f"FAILED {name}: ended with {status}: {begun}")
            lines.append(f"ended with {status}")
        self.report.tests[name] = [lines[-1].strip("= "), *failures]
        self._say(f"{name}: {self.report.tests[name][0]}")

    def _measure(self, group: Group) -> None:
        """Measure a group in a process, and in another one if it faults or hangs."""
        done: dict[str, Figures] = {}
        deadline, command = self._deadline(), [*_WORKER, group.name, *self._tiny]
        seen = -1
        while seen < len(done) < len(group.parts) and deadline - time.time() > _LEAST_S:
            seen = len(done)
            limits = self.report.ceilings
            request = {"done": [*done], "deadline": deadline, "ceilings": limits}
            for row in _rows(command, request, deadline, self._log(group.name)):
                done[row["key"]] = row
                self.report.figures[row["key"]] = row
                self._say(f"{row['key']}: {row.get('reason', 'measured')}")
                self.report.write()
        is_late = deadline - time.time() <= _LEAST_S
        why = {"left_out": "no time was left"} if is_late else {"reason": "its process has died"}
        for part in group.parts:
            self.report.figures.setdefault(part.key, {"key": part.key, **why})


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


def _start(
    command: Sequence[str],
    out: int | IO[str],
    *,
    stdin: int = subprocess.DEVNULL,
    stderr: int | IO[str] = subprocess.STDOUT,
) -> subprocess.Popen[str]:
    environ = {**os.environ, **_ENVIRONMENT}
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=stdin, stdout=out, stderr=stderr, text=True
    )


def _end(process: subprocess.Popen[str], deadline: float) -> int | None:
    """Return its status when it has ended; at the deadline end it, and return None."""
    try:
        return process.wait(max(deadline - time.time(), 0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _rows(
    command: Sequence[str], request: dict[str, Any], deadline: float, log: Path
) -> Iterator[Figures]:
    """Yield the rows that a worker prints; the last one has a `reason` if it died in a part."""
    running: str | None = None
    pipe = subprocess.PIPE
    with (
        log.open("a") as errors,
        _start(command, pipe, stdin=pipe, stderr=errors) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError), process.stdin:  # it has ended, which its output shows too
            process.stdin.write(json.dumps(request) + "\n")
        while True:
            limit = max(min(_HUNG_S, deadline - time.time() + 15), 0.1)
            timer = Timer(limit, process.kill)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line:
                break
            row = json.loads(line)
            running = row["key"] if "begins" in row else None
            if running is None:
                yield row
    if running is not None:
        last = (log.read_text(errors="replace").splitlines() or [""])[-1][:200]
        yield {"key": running, "reason": f"its process ended with {process.returncode}: {last}"}
