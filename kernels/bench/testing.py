"""Runs the tests of the kernels, each operation in processes of its own, and counts.

A faulty kernel takes down every later test of its process: no operation suffers another's faults.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kernels.bench.operations import Operation, owner

_ROOT = Path(__file__).parents[2]
TESTS = _ROOT / "tests" / "kernels"
_NOT_OURS = "test_bench"  # the tests of the benchmark itself run interpreted
_MESSAGE = 300  # characters of a failure


@dataclass(slots=True)
class Outcome:
    """The outcome of an operation's tests.

    Attributes:
        failures: name and message of each test that failed, and of each process.
        seconds: from the start of the first process to the end of the last.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)

    @property
    def green(self) -> bool:
        """Whether something was tested, and nothing failed."""
        return self.passed > 0 and not self.failed

    def add(self, other: Outcome) -> None:
        """Count in another part of the same operation's tests."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.seconds = max(self.seconds, other.seconds)
        self.failures += other.failures


def refusals(operation: Operation, tests: dict[str, Outcome]) -> str | None:
    """Return why an operation is not to be measured, None if its tests are green."""
    for name in (operation.name, *operation.requires):
        found = tests.get(name, Outcome())
        if not found.green:
            what = f"{found.failed} failed" if found.failed else "none passed"
            return f"tests of {name}: {what}"
    return None


def run(
    operations: Sequence[Operation],
    deadline: float,
    *,
    say: Callable[[str], None],
    folder: Path = TESTS,
    workers: int | None = None,
) -> dict[str, Outcome]:
    """Run the tests in `folder`, and return the outcome by operation.

    Files of no operation are run as well, and stand under their own names.

    Args:
        deadline: as of time.time(); what has not ended by then has failed.
        say: is told of every operation as its tests end.
        workers: processes at a time, by default one per core.
    """
    shards = {name: 1 for operation in operations for name in operation.requires}
    shards |= {operation.name: operation.shards for operation in operations}
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("test_*.py")):
        if not file.stem.startswith(_NOT_OURS):
            name = owner(file.relative_to(folder), list(shards))
            files.setdefault(name, []).append(file)
    # Those with the most to compile begin first.
    names = sorted(files, key=lambda name: -shards.get(name, 1))
    started = time.time()
    outcomes: dict[str, Outcome] = {}
    with (
        tempfile.TemporaryDirectory() as work,
        ThreadPoolExecutor(workers or os.cpu_count()) as pool,
    ):
        jobs = {
            name: [
                pool.submit(_shard, files[name], (i, count), folder, deadline, Path(work), started)
                for i in range(count)
            ]
            for name in names
            for count in (shards.get(name, 1),)
        }
        for name in names:
            outcomes[name] = Outcome()
            for job in jobs[name]:
                outcomes[name].add(job.result())
            found = outcomes[name]
            say(f"tests of {name}: {found.passed} passed, {found.failed} failed")
    return outcomes


def _shard(
    files: list[Path],
    shard: tuple[int, int],
    folder: Path,
    deadline: float,
    work: Path,
    started: float,
) -> Outcome:
    """Run one part of an operation's tests in a process."""
    index, count = shard
    name = f"{files[0].stem}-{index}"
    report, log, ini = work / f"{name}.xml", work / f"{name}.log", work / f"{name}.ini"
    # Not the repository's own configuration and conftest.py: they need plugins and packages.
    ini.write_text("[pytest]\n")
    command = [
        *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:warnings"),
        *("-c", str(ini), "--rootdir", str(_ROOT), "--confcutdir", str(folder)),
        *("--import-mode=importlib", "--tb=short", "-o", "junit_family=xunit1"),
        *("-p", "kernels.bench.shard", f"--shard={index}/{count}", f"--junit-xml={report}"),
        *map(str, files),
    ]
    # CI has Hypothesis drop its deadline, which the compilation of a kernel would exceed.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": "1"}
    try:
        with log.open("w") as out:
            code = subprocess.run(
                command,
                cwd=_ROOT,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=max(deadline - time.time(), 0.1),
                check=False,
            ).returncode
        tests = read_report(report) if report.exists() else Outcome()
        # 0: all passed, 1: some failed, 5: this shard has none.
        if code not in (0, 1, 5) or (code == 1 and not tests.failed):
            tests.failed += 1
            tests.failures.append((name, f"pytest ended with code {code}: {_tail(log)}"))
    except subprocess.TimeoutExpired:
        tests = Outcome(failed=1, failures=[(name, f"did not end in time: {_tail(log)}")])
    tests.seconds = time.time() - started
    return tests


def read_report(report: Path) -> Outcome:
    """Return what a JUnit file says."""
    tests = Outcome()
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        if problem is not None:
            tests.failed += 1
            message = " ".join(problem.get("message", "").split())[:_MESSAGE]
            tests.failures.append((case.get("name", ""), message))
        elif case.find("skipped") is not None:
            tests.skipped += 1
        else:
            tests.passed += 1
    return tests


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-2:])[-_MESSAGE:]
