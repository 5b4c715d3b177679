"""The command that measures structured output."""

import pytest

from engine.bench import grammars


def test_it_prints_every_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"_STEPS": 10, "_SIZE": 3000}.items():
        monkeypatch.setattr(grammars, name, value)
    grammars.main(["demo", "--rows", "4", "--step-ms", "1"])
    lines = capsys.readouterr().out.splitlines()[5:]
    cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    rows = {name: list(map(float, figures)) for name, *figures, _ in cells}
    assert rows.keys() == {"no grammar", *grammars.cases()}
    for name, (step, _, each, tokens) in rows.items():
        assert step > 0
        assert (each > 0) is (name != "no grammar")
        assert tokens >= 1
    assert rows["100 KB of tools, schema"][3] > 1.1  # some are forced
