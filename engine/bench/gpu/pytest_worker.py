"""Runs a share of tests in a process of its own, for `Supervisor`.

`python -m engine.bench.gpu.pytest_worker I/N ROOT FILE...` runs every N-th test from the I-th on,
or those that the request names. A kernel that faults would fail all later tests of its process, so
that ends.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.bench.gpu.supervisor import say, usable

_MESSAGE = 300  # maximum characters of a failure's message
_DETAILS = 20_000  # of its traceback


class _Plugin:
    """Chooses the tests, and tells of each as it begins and ends."""

    def __init__(self, share: str, keys: Sequence[str] | None) -> None:
        self._share, self._keys = share, keys
        self._failed = False
        self._out = os.fdopen(os.dup(1), "w")  # pytest captures the other

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._keys is None:
            # Adjacent tests are similar and take similar time: round-robin balances the shares.
            index, count = map(int, self._share.split("/"))
            items[:] = items[index::count]
            say({"keys": [item.nodeid for item in items]}, self._out)
        else:
            items[:] = [item for item in items if item.nodeid in self._keys]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self._keys is None and self._share.startswith("0/"):
            self._fail(report.nodeid, report)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        say({"begins": nodeid}, self._out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._fail(report.nodeid, report)
        elif report.skipped or report.when == "call":
            say({"ends": report.nodeid, "status": report.outcome}, self._out)

    def pytest_runtest_logfinish(self) -> None:
        if self._failed and not usable():
            os._exit(1)  # another process goes on

    def _fail(self, name: str, report: pytest.CollectReport | pytest.TestReport) -> None:
        self._failed = True
        details = report.longreprtext
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = " ".join((crash.message if crash else details).split())[:_MESSAGE]
        figures = {"status": "failed", "reason": reason, "details": details[-_DETAILS:]}
        say({"ends": name, **figures}, self._out)


def main(share: str, root: str, *files: str) -> int:
    """Run tests, whose ids are relative to `root`; return pytest's exit code."""
    plugin = _Plugin(share, json.load(sys.stdin)["keys"])
    # With CI set, Hypothesis drops its deadline, which compiling a kernel would exceed.
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as ini:
        # Without the repository's configuration and conftest.py, which need plugins and packages.
        ini.write("[pytest]\n")
        ini.flush()
        options = [
            *("-q", "-c", ini.name, "--rootdir", root, "--import-mode=importlib"),
            *("--confcutdir", str(Path(files[0]).parent), "--tb=short", "-p", "no:cacheprovider"),
            *("-p", "no:warnings", "--continue-on-collection-errors"),
        ]
        return int(pytest.main([*options, *files], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
