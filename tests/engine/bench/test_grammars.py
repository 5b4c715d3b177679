"""The command that measures structured output."""

import re

import pytest

from engine.bench import grammars


def test_it_prints_every_case_and_both_runs_of_the_streams(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"_STEPS": 10, "_SECONDS": 1.0, "_SIZE": 3000, "_STREAMS": 3}.items():
        monkeypatch.setattr(grammars, name, value)
    grammars.main(["demo", "--rows", "4", "--step-ms", "1"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:26].strip(): line[26:].split() for line in lines[2:-2]}
    assert rows.keys() == {"no grammar", *grammars.cases()}
    for name, (step, _, each, _, tokens) in rows.items():
        assert float(step) > 0
        assert (float(each) > 0) is (name != "no grammar")
        assert float(tokens) >= 1
    assert float(rows["100 KB of tools, schema"][4]) > 1.1  # some are forced
    for line, kind in zip(lines[-2:], ("alone", "while 100 KB compile"), strict=True):
        assert kind in line
        assert re.search(r"p50 \d+\.\d+, p99 \d+\.\d+, longest \d+\.\d+", line)
