"""Runs the tests of the kernels, each operation in separate processes.

A faulting kernel fails all later tests of its process; separate processes confine this to one
operation.
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
_NOT_OURS = "test_bench"  # the tests of the benchmark itself, which run in the interpreter
_MESSAGE = 300  # maximum characters of a failure message


@dataclass(slots=True)
class Outcome:
    """Test results of an operation.

    Attributes:
        failures: name and message of each failed test, and of each failed process.
        seconds: from the start of the first process to the end of the last.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)

    @property
    def green(self) -> bool:
        """Whether tests ran and none failed."""
        return self.passed > 0 and not self.failed

    def add(self, other: Outcome) -> None:
        """Add the results of another shard of the same operation."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.seconds = max(self.seconds, other.seconds)
        self.failures += other.failures


def refusals(operation: Operation, tests: dict[str, Outcome]) -> str | None:
    """Return why an operation must not be measured, None if its tests passed."""
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

    Files of no operation are run as well, under their own names.

    Args:
        deadline: by time.time(); tests still running then have failed.
        say: called for every operation as its tests end.
        workers: parallel processes, by default one per core.
    """
    shards = {name: 1 for operation in operations for name in operation.requires}
    shards |= {operation.name: operation.shards for operation in operations}
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("test_*.py")):
        if not file.stem.startswith(_NOT_OURS):
            name = owner(file.relative_to(folder), list(shards))
            files.setdefault(name, []).append(file)
    # Those that compile most begin first.
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
    """Run one shard of an operation's tests in a process."""
    index, count = shard
    name = f"{files[0].stem}-{index}"
    report, log, ini = work / f"{name}.xml", work / f"{name}.log", work / f"{name}.ini"
    # Without the repository's configuration and conftest.py, which need plugins and packages.
    ini.write_text("[pytest]\n")
    command = [
        *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:warnings"),
        *("-c", str(ini), "--rootdir", str(_ROOT), "--confcutdir", str(folder)),
        *("--import-mode=importlib", "--tb=short", "-o", "junit_family=xunit1"),
        *("-p", "kernels.bench.shard", f"--shard={index}/{count}", f"--junit-xml={report}"),
        *map(str, files),
    ]
    # With CI set, Hypothesis drops its deadline, which compiling a kernel would exceed.
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
        # 0: all passed, 1: some failed, 5: this shard has no tests.
        if code not in (0, 1, 5) or (code == 1 and not tests.failed):
            tests.failed += 1
            tests.failures.append((name, f"pytest ended with code {code}: {_tail(log)}"))
    except subprocess.TimeoutExpired:
        tests = Outcome(failed=1, failures=[(name, f"did not end in time: {_tail(log)}")])
    tests.seconds = time.time() - started
    return tests


def read_report(report: Path) -> Outcome:
    """Parse a JUnit file."""
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
