"""A pytest plugin for tests that several processes share.

`--shard 1/3` runs every third test, starting with the second; `--outcomes FILE` appends a line of
JSON as a test begins and as it ends, so that nothing is lost if the process is killed.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

_MESSAGE = 300  # maximum characters of a failure's message
_DETAILS = 20_000  # of its traceback


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", metavar="I/N", help="run tests I, I + N, ...")
    parser.addoption("--outcomes", metavar="FILE", help="append the outcome of each test to FILE")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Adjacent tests are similar and take similar time: round-robin balances the shards.
    index, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[index::count]


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--outcomes"):
        config.pluginmanager.register(_Writer(Path(file)))


class _Writer:
    """Appends to `file`: the number of tests, then each test as it begins and its outcome."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write({"tests": len(session.items)})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"begins": nodeid.partition("::")[2], "time": time.time()})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed(report.nodeid, report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self._failed(f"{name} ({report.when})" if report.when != "call" else name, report)
        elif report.skipped:
            self._write({"test": name, "outcome": "skipped"})
        elif report.when == "call":
            self._write({"test": name, "outcome": "passed"})

    def _failed(self, name: str, report: pytest.CollectReport | pytest.TestReport) -> None:
        details = report.longreprtext
        crash = getattr(report.longrepr, "reprcrash", None)
        message = " ".join((crash.message if crash else details).split())[:_MESSAGE]
        details = details[-_DETAILS:]
        self._write({"test": name, "outcome": "failed", "message": message, "details": details})

    def _write(self, line: dict[str, object]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
