"""The command that measures structured output."""

import pytest

from engine.bench import grammars


def test_it_prints_every_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"_STEPS": 10, "_SIZE": 3000}.items():
        monkeypatch.setattr(grammars, name, value)
    grammars.main(["demo", "--rows", "4", "--step-ms", "1"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:26].strip(): line[26:].split() for line in lines[2:]}
    assert rows.keys() == {"no grammar", *grammars.cases()}
    for name, (step, _, each, _, tokens) in rows.items():
        assert float(step) > 0
        assert (float(each) > 0) is (name != "no grammar")
        assert float(tokens) >= 1
    assert float(rows["100 KB of tools, schema"][4]) > 1.1  # some are forced
