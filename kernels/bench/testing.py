"""Runs tests in parallel processes, and keeps the outcome of each test as it ends.

A faulting kernel fails all later tests of its process; separate processes confine this to one
suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.bench.operations import Operation, owner

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "kernels"
_NOT_OURS = "test_bench"  # the tests of the benchmark itself, which run in the interpreter
_POLL_S = 1.0
HUNG_S = 100.0  # longer than any test takes, with compilation
_TAIL = 300  # characters of a process's output that say why it ended


@dataclass(frozen=True, slots=True)
class Suite:
    """Test files that are judged together.

    Attributes:
        folder: the conftest.py files of this folder and of those in it apply.
        shards: processes that share its tests; most of their time is compilation.
    """

    name: str
    folder: Path
    files: tuple[Path, ...]
    shards: int = 1


@dataclass(slots=True)
class Outcome:
    """Test results of a suite.

    Attributes:
        left: tests that have not ended.
        failures: name and message of each failed test, and of each failed process.
        details: traceback of each of them.
        seconds: from the start of the first process to the end of the last.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    left: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    @property
    def green(self) -> bool:
        """Whether tests ran and none failed; some may be left."""
        return self.passed > 0 and not self.failed

    def __str__(self) -> str:
        left = f", {self.left} not run in time" if self.left else ""
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped{left}"

    def fail(self, name: str, message: str, details: str = "") -> None:
        """Count a failure."""
        self.failed += 1
        self.failures.append((name, message))
        self.details.append(details or message)

    def add(self, other: Outcome) -> None:
        """Add the results of another shard of the same suite."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.left += other.left
        self.seconds = max(self.seconds, other.seconds)
        self.failures += other.failures
        self.details += other.details


def refusals(operation: Operation, tests: Mapping[str, Outcome]) -> str | None:
    """Return why an operation must not be measured, None if its tests passed."""
    for name in (operation.name, *operation.requires):
        found = tests.get(name, Outcome())
        if not found.green:
            what = f"{found.failed} failed" if found.failed else "none passed"
            return f"tests of {name}: {what}"
    return None


def kernel_suites(operations: Sequence[Operation], folder: Path = TESTS) -> list[Suite]:
    """Return the suites in `folder`, those that compile most first.

    Files of no operation are suites of their own.
    """
    shards = {name: 1 for operation in operations for name in operation.requires}
    shards |= {operation.name: operation.shards for operation in operations}
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("test_*.py")):
        if not file.stem.startswith(_NOT_OURS):
            name = owner(file.relative_to(folder), list(shards))
            files.setdefault(name, []).append(file)
    names = sorted(files, key=lambda name: -shards.get(name, 1))
    return [Suite(name, folder, tuple(files[name]), shards.get(name, 1)) for name in names]


def run(
    suites: Sequence[Suite],
    deadline: float,
    *,
    say: Callable[[str], None],
    changed: Callable[[dict[str, Outcome]], None] = lambda outcomes: None,
    workers: int | None = None,
) -> dict[str, Outcome]:
    """Run the suites, the first ones first, and return the outcome by suite.

    Args:
        deadline: by time.time(); tests that have not ended then are left.
        say: called for every suite as it ends.
        changed: called about every second with the outcomes so far.
        workers: parallel processes, by default one per core.
    """
    started = time.time()
    with (
        tempfile.TemporaryDirectory() as work,
        ThreadPoolExecutor(workers or os.cpu_count()) as pool,
    ):
        shards: dict[str, list[_Shard]] = {
            suite.name: [
                _Shard(suite, index, Path(work), deadline, started) for index in range(suite.shards)
            ]
            for suite in suites
        }
        ends: dict[str, list[Future[None]]] = {
            name: [pool.submit(shard.run) for shard in found] for name, found in shards.items()
        }
        while True:
            done = {name: all(end.done() for end in found) for name, found in ends.items()}
            outcomes = {name: _sum(found) for name, found in shards.items()}
            changed(outcomes)
            for name in [name for name, ended in done.items() if ended]:
                for end in ends.pop(name):
                    end.result()
                say(f"tests of {name}: {outcomes[name]}")
            if not ends:
                return outcomes
            time.sleep(_POLL_S if max(o.seconds for o in outcomes.values()) > _POLL_S else 0.05)


def _sum(shards: Sequence[_Shard]) -> Outcome:
    outcome = Outcome()
    for shard in shards:
        outcome.add(shard.outcome())
    return outcome


class _Shard:
    """A process that runs a share of a suite's tests."""

    def __init__(
        self, suite: Suite, index: int, work: Path, deadline: float, started: float
    ) -> None:
        self._suite = suite
        self._index = index
        self._deadline = deadline
        self._started = started
        self._name = f"{suite.name}-{index}"
        self._log = work / f"{self._name}.log"
        self._outcomes = work / f"{self._name}.jsonl"
        self._outcomes.touch()
        self._ini = work / f"{self._name}.ini"
        # Without the repository's configuration and conftest.py, which need plugins and packages.
        self._ini.write_text("[pytest]\n")
        self._seconds = 0.0
        self._fault: str | None = None  # how the process failed

    def run(self) -> None:
        """Start the process and wait for it."""
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings"),
            *("-c", str(self._ini), "--rootdir", str(ROOT)),
            *("--confcutdir", str(self._suite.folder), "--import-mode=importlib", "--tb=short"),
            *("-p", "kernels.bench.shard", f"--shard={self._index}/{self._suite.shards}"),
            *(f"--outcomes={self._outcomes}", *map(str, self._suite.files)),
        ]
        # With CI set, Hypothesis drops its deadline, which compiling a kernel would exceed.
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": "1"}
        seconds = self._deadline - time.time()
        if seconds <= 0:
            return
        try:
            with self._log.open("w") as out:
                code = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                    check=False,
                ).returncode
            # 0: all passed, 1: some failed, 5: this shard has no tests.
            if code not in (0, 1, 5) or (code == 1 and not self.outcome().failed):
                self._fault = f"pytest ended with code {code}: {self._tail()}"
        except subprocess.TimeoutExpired:
            self._fault = self._hung()
        self._seconds = time.time() - self._started

    def outcome(self) -> Outcome:
        """Return the results so far."""
        found = Outcome(seconds=self._seconds)
        for line in self._lines():
            if "begins" in line:
                continue
            if "tests" in line:
                found.left = line["tests"]
                continue
            found.left = max(found.left - 1, 0)  # a failed collection is not in the count
            if line["outcome"] == "failed":
                found.fail(line["test"], line["message"], line["details"])
            elif line["outcome"] == "passed":
                found.passed += 1
            else:
                found.skipped += 1
        if self._fault is not None:
            found.fail(self._name, self._fault)
        return found

    def _hung(self) -> str | None:
        """Return which test has hung, if any, when the process is stopped."""
        last = (self._lines() or [{}])[-1]
        seconds = time.time() - last.get("time", time.time())
        return f"{last['begins']} did not end in {seconds:.0f} s" if seconds > HUNG_S else None

    def _lines(self) -> list[dict[str, Any]]:
        text = self._outcomes.read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def _tail(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line]
        return " | ".join(lines[-2:])[-_TAIL:]
