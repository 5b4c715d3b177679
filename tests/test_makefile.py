"""The targets of the Makefile."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split()[1] for line in done.stdout.splitlines()]
    (phony,) = re.findall(r"^\.PHONY: (.+)$", TEXT.replace("\\\n", ""), re.MULTILINE)
    assert sorted(listed) == sorted(phony.split())
    assert "make demo " in done.stdout
    assert "Start the server on the bundled model" in done.stdout


def test_what_serves_needs_no_tools_of_development() -> None:
    command = ["make", "--dry-run", "--always-make", "serve"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--editable '.[server]'" in done.stdout
    assert "--group dev" not in done.stdout


def test_what_tests_needs_them() -> None:
    for target in ("lint", "check", "test", "interpreted", "compiled", "bench"):
        command = ["make", "--dry-run", "--always-make", target]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "--group dev" in done.stdout, target


def test_all_tests_that_start_servers_are_in_the_folders_of_their_part() -> None:
    (folders,) = re.findall(r"-m 'server and \(\$\(SELECT\)\)' (.+)$", TEXT, re.MULTILINE)
    marks = re.compile(r"pytest\.mark\.server\b")
    marked = [path for path in (ROOT / "tests").rglob("*.py") if marks.search(path.read_text())]
    outside = [
        path.relative_to(ROOT)
        for path in marked
        if not any(path.is_relative_to(ROOT / folder) for folder in folders.split())
    ]
    assert marked
    assert not outside
